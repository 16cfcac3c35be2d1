"""The benchmark scripts import, and the demo's seeds are its commands'."""

from __future__ import annotations

import importlib
import json
import logging
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks import demo
from tests.support.tiny import write_recipe

from treegraft.settings.load import load_config
from treegraft.train import train

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "benchmarks").rglob("*.py")
    if path.name not in ("__main__.py", "trl_peer.py")  # one runs, one needs TRL
)


@pytest.mark.parametrize("module", MODULES)
def test_each_script_imports(module: str) -> None:
    importlib.import_module(module)


SHORT = ("run.num_updates=1", "tasks.num_eval=4")
RECIPE = ROOT / "recipes" / "demo.toml"


@pytest.fixture
def small_demo(tmp_path: Path) -> Iterator[Path]:
    """The demo's recipe at the size of two trees of a small model."""
    recipe = tomllib.loads(RECIPE.read_text(encoding="utf-8"))
    recipe["model"]["tiny"] |= {"hidden_size": 32, "num_layers": 1, "intermediate_size": 64}
    recipe["run"] |= {"tasks_per_update": 2}
    recipe["tasks"] |= {"num_train": 16}
    recipe["rollout"] |= {"max_completion_tokens": 40}
    recipe["warmup"] |= {"num_steps": 2, "batch_size": 8}
    del recipe["smoke"]
    disabled = logging.root.manager.disable
    yield write_recipe(tmp_path / "small.json", recipe)
    logging.disable(disabled)


@pytest.mark.smoke
def test_seeds_of_the_demo_are_what_its_commands_give(
    small_demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warm-up for both methods and one evaluation give what a whole run gives."""
    monkeypatch.setattr(demo, "RESULTS", tmp_path / "demo.jsonl")
    monkeypatch.setattr(demo, "LAST_ONLY", (*demo.LAST_ONLY, *SHORT))
    monkeypatch.setattr(demo, "RECIPE", small_demo)
    found = demo.run_seed(3, list(demo.METHODS), tmp_path)
    for line, overrides in zip(found, demo.METHODS.values(), strict=True):
        common = ["run.seed=3", f"run.dir={tmp_path}", *SHORT]
        metrics = train(load_config(small_demo, [*common, *overrides]), display=False).metrics
        assert line[demo.ACCURACY] == metrics[demo.ACCURACY]
        assert line[demo.TOKENS] == metrics[demo.TOKENS] > 0
    text = "".join(json.dumps(line) + "\n" for line in found)
    demo.RESULTS.write_text(text, encoding="utf-8")
    names = [row.split(" | ")[0] for row in demo.table()][2:]
    assert names == [f"| {method}" for method in demo.METHODS]
