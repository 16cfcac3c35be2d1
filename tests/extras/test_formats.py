"""Trees as logs of Inspect.

Its reader lives in an environment of its own. INSPECT_PYTHON names its Python; without it that test
is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import zipfile
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.support.tiny import tiny
from tests.support.trees import Part, build_tree
from typer.testing import CliRunner

from treegraft import Tree, read_trees
from treegraft import train as train_run
from treegraft.cli.main import app
from treegraft.extras.formats.inspect import write_log
from treegraft.parts import BranchCause, GraftCause


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with branches and grafts."""
    tables = tiny(
        run={
            "num_updates": 1,
            "tasks_per_update": 4,
            "name": "made",
            "seed": 3,
            "dir": str(tmp_path_factory.mktemp("runs")),
        },
        explore={
            "explorers": ["entropy", "graft"],
            "num_leaves": 8,
            "entropy": {"num_starts": 4, "base_prob": 1.0},
            "graft": {"num_hybrid": 2, "probability": 0.5},
        },
        buffer={"path": "expert", "encoder": "hashing", "terminal": "exclude"},
        eval={"every": 0, "at_start": False, "at_end": False},
        warmup={"num_steps": 100},
    )
    return train_run(tables, display=False).run_dir


def exported(run: Path, folder: Path) -> tuple[Path, list[Tree]]:
    done = CliRunner().invoke(app, ["export", str(run), "--out", str(folder)])
    assert done.exit_code == 0, done.output
    (path,) = folder.iterdir()
    return path, list(read_trees(run / "trees" / "update-000001.jsonl"))


def of_kind(trees: list[Tree], kind: type) -> int:
    """Steps with a cause of this kind, as often as a leaf lies below them."""
    return sum(
        isinstance(step.cause, kind)
        for tree in trees
        for path in tree.trajectories()
        for step in path.steps[1:]
    )


def test_a_log_of_inspect_has_a_sample_for_each_leaf(run: Path, tmp_path: Path) -> None:
    path, trees = exported(run, tmp_path)
    assert path.name == "update-000001.eval"
    with zipfile.ZipFile(path) as archive:
        samples = [
            json.loads(archive.read(name))
            for name in archive.namelist()
            if name.startswith("samples/")
        ]
    paths = [one for tree in trees for one in tree.trajectories()]
    assert len(samples) == len(paths)
    assert [one["scores"]["reward"]["value"] for one in samples] == [
        one.leaf.reward for one in paths
    ]
    events = [event for one in samples for event in one["events"]]
    branches = [event for event in events if event["event"] == "branch"]
    grafts = [event for event in events if event.get("source") == "treegraft: graft"]
    assert len(branches) == of_kind(trees, BranchCause) > 0
    assert len(grafts) == of_kind(trees, GraftCause) > 0
    # A branch begins at an anchor that another leaf of its task has too.
    anchors = {event["anchor_id"] for event in events if event["event"] == "anchor"}
    assert {event["from_anchor"] for event in branches} <= anchors | {"0"}


def test_tasks_of_like_names_stay_apart_in_a_log(tmp_path: Path) -> None:
    names = ("a/b", "a_b", "a/b_")
    trees = [build_tree(Part("p", (Part("s", reward=1.0),)), task_id=one) for one in names]
    write_log(tmp_path / "log.eval", trees, model="m", name="n", when=datetime.now(UTC))
    with zipfile.ZipFile(tmp_path / "log.eval") as archive:
        files = [one for one in archive.namelist() if one.startswith("samples/")]
        listed = json.loads(archive.read("header.json"))["eval"]["dataset"]["sample_ids"]
    assert listed == ["a_b", "a_b_", "a_b__"]
    assert files == [f"samples/{one}_epoch_1.json" for one in listed]


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    done = CliRunner().invoke(app, ["export", str(tmp_path)])
    assert "it has no trees" in str(done.exception)


READ_INSPECT = """
import sys
from inspect_ai.log import read_eval_log, read_eval_log_sample_summaries
log = read_eval_log(sys.argv[1])
kinds = [event.event for one in log.samples for event in one.events]
print(log.status, len(log.samples), len(read_eval_log_sample_summaries(sys.argv[1])),
      kinds.count("branch"), log.results.scores[0].metrics["mean"].value)
"""


@pytest.mark.skipif("INSPECT_PYTHON" not in os.environ, reason="no Python that has the reader")
def test_inspects_own_reader_reads_the_log(run: Path, tmp_path: Path) -> None:
    path, trees = exported(run, tmp_path)
    rewards = [leaf.reward for tree in trees for leaf in tree.leaves if leaf.reward is not None]
    command = [os.environ["INSPECT_PYTHON"], "-c", READ_INSPECT, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    status, samples, summaries, branches, mean = done.stdout.split()
    assert (status, int(samples), int(summaries)) == ("success", len(rewards), len(rewards))
    assert int(branches) == of_kind(trees, BranchCause)
    assert float(mean) == pytest.approx(sum(rewards) / len(rewards))
