"""Attention over blocks where they lie: Triton's kernels in its interpreter, their proof, and that
they compile for a GPU."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from treegraft.policy.attention_hook import AttentionOptions
from treegraft.policy.engine import gathered
from treegraft.policy.engine.gathered import Gathered, makes_copies

ROOT = Path(__file__).resolve().parents[1]
triton_only = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("paged") / "found.json"
    command = [sys.executable, "-W", "ignore", "-m", "tests.paged_worker", str(file)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.mark.slow
@triton_only
@pytest.mark.parametrize(
    "case", ["lengths", "shared", "half", "window", "softcap", "sinks", "everything"]
)
def test_paged_attention_is_that_of_a_slow_loop_and_of_its_own_path_alone(
    case: str, computed: dict[str, Any]
) -> None:
    """float64, head by head; and bit for bit the same row with and without company."""
    assert computed[case]["gap"] < (5e-3 if case == "half" else 5e-6)
    assert computed[case]["num_changed"] == 0


@pytest.mark.slow
@triton_only
def test_an_engine_with_paged_attention_gives_the_same_tokens_in_any_company(
    computed: dict[str, Any],
) -> None:
    found = computed["engine"]
    assert found["paged"] == found["plain"] and found["alone"] == found["paged"][:1]
    assert found["num_asked"] > 10 and found["proofs"] == [True]
    assert not found["makes_copies"]


@pytest.mark.slow
@triton_only
@pytest.mark.parametrize("element", ["bf16", "fp32"])
def test_the_kernels_compile_for_a_gpu(element: str, tmp_path: Path) -> None:
    """For an H100 and heads of Qwen2.5-7B; no GPU is needed to compile."""
    code = f"""
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from treegraft.policy.kernels import paged

def built(kernel, constants, pointers, floats):
    types = {{name: "i32" for name in kernel.arg_names}} | pointers
    types |= dict.fromkeys(floats, "fp32") | dict.fromkeys(constants, "constexpr")
    places = {{(kernel.arg_names.index(name),): value for name, value in constants.items()}}
    source = ASTSource(fn=kernel, signature=types, constexprs=places)
    return len(compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"])

own = dict.fromkeys(("query", "keys", "values", "out", "sinks"), "*{element}")
sums = dict.fromkeys(("peaks", "totals", "weighted"), "*fp32")
places = dict.fromkeys(("used", "positions"), "*i64")
pointers = own | sums | places
common = dict(WIDTH=128, SIDE=128, HAS_WINDOW=False)
split = common | dict(KV=4, GROUP=7, PADDED=128, ROWS=paged.TOGETHER, HEADS=8, SPLIT=paged.SPLIT,
    BLOCK=64, HAS_SOFTCAP=True, PRECISION="{"ieee" if element == "fp32" else "tf32"}")
join = common | dict(HEADS=28, SPAN=512, HAS_SINKS=True)
for kernel, constants in ((paged._split, split), (paged._join, join)):
    used = {{name: kind for name, kind in pointers.items() if name in kernel.arg_names}}
    floats = [name for name in ("scaling", "softcap") if name in kernel.arg_names]
    print(built(kernel, constants, used, floats) > 1000)
"""
    # From a file: Triton reads the source of what it compiles.
    script = tmp_path / "build.py"
    script.write_text(code)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.split() == ["True", "True"], done.stderr[-3000:]


def test_where_the_kernels_fail_blocks_are_copied_with_a_notice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without Triton its import fails; with it and without a GPU its driver does."""
    monkeypatch.setattr(gathered, "has_triton", lambda device: True)
    monkeypatch.setattr(gathered, "_proofs", {})
    monkeypatch.setitem(sys.modules, "treegraft.policy.kernels.paged", None)
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(6, 1, 16, 64, generator=generator), torch.zeros(6, 1, 64, 16)
    plan = Gathered.of(torch.tensor([5, 70]), torch.tensor([[0, 1], [2, 3]]))
    asked, rules = torch.randn(2, 2, 16), AttentionOptions(0.25, None, None, None)
    device = torch.device("cpu")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            found = plan.attend(asked, keys, values, rules)
    assert torch.equal(found, plan.attend_copies(asked, keys, values, rules))
    assert caplog.text.count("copies the blocks of every path") == 1
    assert "failed with" in caplog.text and makes_copies(device)


def test_kernels_with_other_numbers_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import types

    wrong = types.ModuleType("treegraft.policy.kernels.paged")
    wrong.attend_blocks = lambda query, *rest: query.transpose(0, 1) * float("nan")  # type: ignore[attr-defined]
    monkeypatch.setattr(gathered, "has_triton", lambda device: True)
    monkeypatch.setattr(gathered, "_proofs", {})
    monkeypatch.setitem(sys.modules, "treegraft.policy.kernels.paged", wrong)
    keys, values = torch.randn(6, 1, 16, 64), torch.randn(6, 1, 64, 16)
    plan = Gathered.of(torch.tensor([5, 70]), torch.tensor([[0, 1], [2, 3]]))
    rules = AttentionOptions(0.25, None, None, None)
    with caplog.at_level(logging.WARNING):
        found = plan.attend(torch.randn(2, 2, 16), keys, values, rules)
    assert found.isfinite().all() and "differ from it by nan" in caplog.text
