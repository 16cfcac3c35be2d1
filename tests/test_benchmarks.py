"""The benchmark scripts import, and the comparison of methods runs."""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks import demo, methods
from tests.tiny import write_recipe

from treegraft.settings.load import load_config
from treegraft.train import train

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "benchmarks").rglob("*.py")
    if path.name not in ("__main__.py", "trl_peer.py")  # one runs, one needs TRL
)


@pytest.mark.parametrize("module", MODULES)
def test_each_script_imports(module: str) -> None:
    importlib.import_module(module)


SHORT = ("run.num_updates=1", "tasks.num_eval=4")

KINDS = [
    *(methods.Job("boundary", method, 0) for method in ("GRPO", "ARPO", methods.SFT)),
    *(methods.Job("imperfect", method, 0) for method in ("RAPO", methods.SFT)),
    methods.Job("short", "GRPO", 0),
]
"""One job for each way through the code: plain, branched, imitation, a buffer that is built first,
another world."""
REST = [
    job
    for method in (*methods.METHODS, *methods.ABLATIONS)
    if (job := methods.Job("boundary", method, 0)) not in KINDS
]


@pytest.fixture
def small_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The study at the size of two updates of a small model; yields its folder."""
    recipe = tomllib.loads(methods.RECIPE.read_text(encoding="utf-8"))
    recipe["model"]["tiny"] |= {"hidden_size": 32, "num_layers": 1, "intermediate_size": 64}
    recipe["run"] |= {"tasks_per_update": 2}
    recipe["tasks"] |= {"num_train": 16}
    recipe["rollout"] |= {"max_completion_tokens": 40}
    recipe["warmup"] |= {"num_steps": 2, "batch_size": 8}
    small = {
        "RECIPE": write_recipe(tmp_path / "small.json", recipe),
        "RESULTS": tmp_path / "methods.jsonl",
        "NUM_UPDATES": 1,
        "NUM_WARMUP_STEPS": 2,
        "EVERY": 1,
        "NUM_EVAL": 4,
        "COMMON": (
            "run.num_updates=1",
            "tasks.num_eval=4",
            "eval.every=1",
            "eval.greedy=false",
            "checkpoint.every=1",
        ),
    }
    for name, value in small.items():
        monkeypatch.setattr(methods, name, value)
    disabled = logging.root.manager.disable
    yield tmp_path
    logging.disable(disabled)


@pytest.mark.parametrize(
    "jobs", [KINDS, pytest.param(REST, marks=pytest.mark.slow)], ids=["kinds", "rest"]
)
def test_jobs_run_and_are_tabulated(jobs: list[methods.Job], small_study: Path) -> None:
    for job in jobs:
        methods.run_warmup(job.world, 0, small_study)
        methods.run_job(job, small_study)
    methods.collect(jobs, small_study)
    assert list(methods.results()) == jobs
    for found in methods.results().values():
        assert [point["update"] for point in found["curve"]] == [0, 1]
    names = [job.method for job in jobs if job.world == "boundary"]
    rows = methods.table("boundary", names, 1, names[0])
    assert [row.split(" | ")[0] for row in rows[4:-1]] == [f"| {name}" for name in names]
    # Two steps of warm-up teach no call, so there is nothing to compare branches by.
    assert methods.branching_costs(1) == [""]


@pytest.mark.parametrize("method", [*methods.METHODS, *methods.ABLATIONS])
@pytest.mark.parametrize("world", methods.WORLDS)
def test_settings_of_each_job_are_accepted(world: str, method: str) -> None:
    assert methods.told_apart(methods.Job(world, method, 0))["study.imitates"] == (
        method == methods.SFT
    )


def test_seeds_of_the_demo_are_what_its_commands_give(
    small_study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warm-up for both methods and one evaluation give what a whole run gives."""
    monkeypatch.setattr(demo, "RESULTS", small_study / "demo.jsonl")
    monkeypatch.setattr(demo, "LAST_ONLY", (*demo.LAST_ONLY, *SHORT))
    monkeypatch.setattr(demo, "RECIPE", methods.RECIPE)
    found = demo.run_seed(3, list(demo.METHODS), small_study)
    for line, overrides in zip(found, demo.METHODS.values(), strict=True):
        common = ["run.seed=3", f"run.dir={small_study}", *SHORT]
        metrics = train(load_config(methods.RECIPE, [*common, *overrides]), display=False).metrics
        assert line[demo.ACCURACY] == metrics[demo.ACCURACY]
        assert line[demo.TOKENS] == metrics[demo.TOKENS] > 0
    text = "".join(json.dumps(line) + "\n" for line in found)
    demo.RESULTS.write_text(text, encoding="utf-8")
    names = [row.split(" | ")[0] for row in demo.table()][2:]
    assert names == [f"| {method}" for method in demo.METHODS]


@pytest.mark.parametrize("script", ["methods.py", "demo.py", "tools.py", "search.py"])
def test_scripts_explain_themselves(script: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), "--help"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0 and done.stdout.startswith("usage:"), done.stderr
