"""What only a GPU runs, as far as it can be had without one: the programs that are compiled for it,
and the list of all places where something is.

The slow cases need triton (`pip install triton==3.9.0`) and g++; they launch nothing.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "treegraft"
SITES = {("policy/learn/flex.py", "compiled_flex"): "tests.fake_h100.flex"}
"""Every place that has something compiled for a GPU, and the program here that compiles it."""
SHARED = 232_448


def compiles(node: ast.AST) -> bool:
    """Whether a node is `torch.compile`, or an import of Triton."""
    if isinstance(node, ast.Attribute) and node.attr == "compile":
        return isinstance(node.value, ast.Name) and node.value.id == "torch"
    names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
    names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    return any(name.partition(".")[0] == "triton" for name in names)


def test_every_program_for_a_gpu_is_in_the_list() -> None:
    found = set()
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "torch.compile" not in text and "triton" not in text:
            continue
        tree = ast.parse(text)
        places = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)]
        for node in filter(compiles, ast.walk(tree)):
            line = node.lineno  # type: ignore[attr-defined]
            around = [one for one in places if one.lineno <= line <= (one.end_lineno or 0)]
            name = max(around, key=lambda one: one.lineno).name if around else "the module"
            found.add((str(path.relative_to(SOURCE)), name))
    assert found == SITES.keys()


@functools.cache
def guard(folder: str) -> Path:
    path = Path(folder) / "guard.so"
    torch_ = Path(torch.__file__).parent
    command = ["g++", "-O0", "-shared", "-fPIC", "-std=c++20", f"-I{torch_}/include"]
    command += [f"-I{torch_}/include/torch/csrc/api/include", f"-L{torch_}/lib"]
    command += [str(ROOT / "tests/fake_h100/guard.cpp"), "-o", str(path)]
    command += [f"-Wl,-rpath,{torch_}/lib", "-lc10", "-ltorch_cpu"]
    subprocess.run(command, check=True)
    return path


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.parametrize(
    ("heads", "dtype", "window"),
    [
        ("28,4,128", "bfloat16", 0),  # Qwen2.5-7B
        ("12,2,128", "bfloat16", 0),  # 1.5B
        ("32,8,128", "bfloat16", 0),  # 8B
        ("40,8,128", "bfloat16", 0),  # 32B
        ("9,3,64", "float32", 0),  # SmolLM2-135M
        ("28,4,128", "bfloat16", 512),
    ],
)
def test_attention_compiles_for_an_h100(
    heads: str, dtype: str, window: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Forward and backward: every program fits into shared memory, those in bfloat16 spill nothing
    forward and little backward, and packs of other lengths take the programs of the first one."""
    folder = tmp_path_factory.getbasetemp()
    environment = os.environ | {
        "LD_PRELOAD": str(guard(str(folder))),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    program = SITES["policy/learn/flex.py", "compiled_flex"]
    done = subprocess.run(
        [sys.executable, "-m", program, dtype, heads, str(window), "4097,1500,9000"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    programs = found["programs"]
    print(heads, dtype, window, json.dumps(programs))
    assert any("backward" in one["name"] or "bwd" in one["name"] for one in programs)
    assert not [one for one in programs if "fault" in one]
    assert max(one["shared"] for one in programs) <= SHARED
    if dtype == "bfloat16":
        assert not [one for one in programs if one["spilled"] and "backward" not in one["name"]]
        # Of torch's own kernel for heads of 128, with 255 registers: 1,256 at 28 and 4 heads.
        assert max(one["spilled"] for one in programs) <= 2048
    assert len(set(found["graphs"])) == 1
