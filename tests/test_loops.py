"""Law 18: loops of one's own, from the public names alone, give the weights and metrics of `train`
bit for bit."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from tests.support.tiny import is_timing, tiny

from treegraft import TraceBuffer, load_config, sft, train
from treegraft.runs.record import read_metrics

LOOPS = Path(__file__).resolve().parents[1] / "examples" / "loops"
TABLES: dict[str, dict[str, Any]] = {
    "grpo": {"learn": {"num_minibatches": 1}},
    "arpo": {
        "explore": {"explorers": ["entropy"], "entropy": {"num_starts": 2, "threshold": 0.0}},
        "credit": {"attribution": "hard"},
        "loss": {"aggregation": "token-mean", "graft_coef": 0.0, "kl_coef": 0.05},
    },
    "rapo": {
        "explore": {"explorers": ["graft"], "graft": {"num_hybrid": 2, "probability": 0.9}},
        "buffer": {"path": "expert", "encoder": "hashing", "grow": {"num_best": 1}},
        "loss": {"shaping_weight": 0.3},
    },
    "lessons": {
        "buffer": {"path": "self", "encoder": "hashing", "grow": {"num_best": 1}},
        "loss": {"lesson_coef": 0.5},
        "learn": {"num_lessons": 2},
    },
}
LOOP_OF = {"lessons": "rapo"}
"""Where it has another name."""
NUM_UPDATES = 3
BUFFER = Path("buffer") / "traces.sqlite"
SAVED = Path("agent") / "treegraft" / BUFFER


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny agent that has seen demonstrations, so that rewards differ."""
    folder = tmp_path_factory.mktemp("start")
    warm = {"num_steps": 60, "graft_prob": 0.3}
    done = sft(tiny(run={"dir": str(folder)}, warmup=warm, eval={"every": 0}), display=False)
    return done.checkpoint_dir


def tables_of(name: str, start: Path, folder: Path) -> dict[str, Any]:
    run = {"dir": str(folder), "num_updates": NUM_UPDATES, "name": "run", "tasks_per_update": 6}
    model = {"path": str(start)}
    warmup = {"num_steps": 0}
    evaluation = {"every": 0, "at_start": False, "at_end": False}
    return tiny(**TABLES[name], run=run, model=model, warmup=warmup, eval=evaluation)


@pytest.mark.parametrize("name", TABLES)
def test_law_18_a_loop_equals_train(name: str, start: Path, tmp_path: Path) -> None:
    tables = tables_of(name, start, tmp_path / "runs")
    trained = train(tables, display=False)
    loop = runpy.run_path(str(LOOPS / f"{LOOP_OF.get(name, name)}.py"))["loop"]
    config = load_config(tables)
    metrics = loop(config, tmp_path / "agent")

    lines = [line for line in read_metrics(trained.run_dir) if line["update"] > 0]
    assert len(lines) == len(metrics) == NUM_UPDATES
    for theirs, ours in zip(lines, metrics, strict=True):
        shared = {key for key in ours if not is_timing(key)}
        assert shared <= theirs.keys()
        assert {key: ours[key] for key in shared} == {key: theirs[key] for key in shared}
        # What remains is the run's: its health, and what a step of one's own does not measure.
        rest = {key for key in theirs if not is_timing(key)} - shared
        of_learner = ("learn/",) if name == "grpo" else ()
        of_run = ("update", "policy_version", "health/", *of_learner)
        assert {key for key in rest if not key.startswith(of_run)} == set()
    assert any(line["learn/grad_norm"] > 0 for line in lines)
    assert MARKS[name](lines)

    ours = files(tmp_path / "agent")
    theirs = files(trained.checkpoint_dir)
    # What a run keeps in its folder, a loop keeps in its checkpoint.
    reference = ours.pop("treegraft/reference/reference.safetensors", None)
    traces = trained.run_dir / BUFFER
    if reference is not None:
        of_run = trained.run_dir / "reference" / "reference.safetensors"
        assert reference == of_run.read_bytes()
    assert (ours.pop("treegraft/buffer/traces.sqlite", None) is not None) == traces.exists()
    if traces.exists():
        with TraceBuffer(traces, None) as held, TraceBuffer(tmp_path / SAVED, None) as saved:
            assert [*held] == [*saved]
    assert ours.keys() == theirs.keys()
    assert [one for one in ours if ours[one] != theirs[one]] == []
    assert ours["model.safetensors"] != (start / "model.safetensors").read_bytes()


MARKS = {
    "grpo": lambda lines: True,
    "arpo": lambda lines: (
        sum(line["branch/num_branches"] for line in lines) > 0 and lines[-1]["learn/kl"] > 0
    ),
    "rapo": lambda lines: (
        lines[0]["rollout/retrieved_frac"] > 0
        and lines[-1]["buffer/num_own"] > 0
        and any(line["graft/num_grafts"] > 0 for line in lines)
    ),
    "lessons": lambda lines: (
        lines[-1]["lesson/num_lessons"] > 0 and lines[-1]["lesson/weight_mean"] > 0
    ),
}
"""What makes each loop one of its method."""


def files(folder: Path) -> dict[str, Any]:
    """Returns the bytes of a checkpoint by file, without the state of a run; settings as they
    are but for where the run lies."""
    found: dict[str, Any] = {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file() and file.name != "state.json"
    }
    settings = json.loads(found["treegraft/config.json"])
    settings["run"]["dir"] = ""
    return found | {"treegraft/config.json": settings}


@pytest.mark.parametrize("name", sorted(TABLES.keys() - LOOP_OF))
def test_loops_are_built_on_the_public_names(name: str) -> None:
    text = (LOOPS / f"{name}.py").read_text(encoding="utf-8")
    found = set(re.findall(r"^from (treegraft[\w.]*) import", text, re.M))
    assert "treegraft" in found and found <= {"treegraft", "treegraft.parts"}
    assert "[C]" in text or "C tokens" in text
