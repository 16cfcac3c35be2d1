"""The benchmark scripts import, and the comparison of methods runs."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from benchmarks import methods
from tests.tiny import tiny

from treegraft.runs.record import read_metrics
from treegraft.settings.load import load_config

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "benchmarks").rglob("*.py")
    if path.name not in ("__main__.py", "trl_peer.py")  # one runs, one needs TRL
)


@pytest.mark.parametrize("module", MODULES)
def test_each_script_imports(module: str) -> None:
    importlib.import_module(module)


def test_imitation_of_the_buffer_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "NUM_UPDATES", 3)
    monkeypatch.setattr(methods, "EVERY", 3)
    config = load_config(
        tiny(
            explore={"explorers": ["graft"], "graft": {"num_hybrid": 1}},
            buffer={"path": "expert", "encoder": "hashing"},
            warmup={"batch_size": 4, "num_steps": 0},
            learn={"lr": 1e-2, "num_minibatches": 2},
        )
    )
    methods.imitate(config, tmp_path)
    lines = read_metrics(tmp_path)
    assert [line["update"] for line in lines] == [0, 1, 2, 3]
    assert [line["update"] for line in lines if "eval/accuracy" in line] == [0, 3]
