"""Whole runs that branch and graft: what is recorded, a growing buffer, laws 6, 11 and 12, and
buffers that cannot be used."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.error_codes import raises_code
from tests.support.tiny import differing, tiny
from tests.support.tiny_parts import SlowSearch

from treegraft.core.errors import (
    DataError,
    ModelError,
    SettingError,
    TreegraftError,
)
from treegraft.core.types import BranchCause, GraftCause, Origin, StepContent, ToolCall, Trace
from treegraft.runs import run as runs
from treegraft.runs.display import PlainDisplay
from treegraft.runs.metrics import meaning
from treegraft.runs.record import RunFolder, read_metrics, read_trees
from treegraft.runs.run import new_run_path
from treegraft.runs.tree_files import parts_in
from treegraft.traces.buffer import TraceBuffer
from treegraft.traces.rollout_buffer import OWN_FILE
from treegraft.train import RunResult, train

BOTH: dict[str, Any] = {
    "run": {"num_updates": 3},
    "tasks": {"search_world": {"hops": [1, 3]}},
    "explore": {
        "explorers": ["entropy", "graft"],
        "num_leaves": 6,
        "entropy": {"num_starts": 4, "rule": "bernoulli", "normaliser": "none"},
        "graft": {"num_hybrid": 4, "probability": 0.8},
    },
    "buffer": {
        "path": "expert",
        "encoder": "hashing",
        "grow": {"num_best": 2, "min_reward": 0.5},
    },
    "credit": {"attribution": "hard"},
    "loss": {"graft_coef": 1.0},
    "rollout": {"max_completion_tokens": 70, "max_agent_steps": 6, "max_tool_calls": 5},
    "warmup": {"graft_prob": 0.3, "continue_prob": [0.6]},
    "eval": {"num_samples": 1},
    "engine": {"max_rows": 18},
    "model": {"tiny": {"max_context": 128}},
}


def start(folder: Path, name: str, **tables: Any) -> RunResult:
    settings = tiny(**BOTH)
    for table, values in tables.items():
        settings[table] = {**settings[table], **values}
    return train({**settings, "run": {**settings["run"], "name": name, "dir": str(folder)}})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return start(tmp_path_factory.mktemp("grafted"), "a")


def test_it_branches_grafts_learns_and_says_so(run: RunResult) -> None:
    lines = read_metrics(run.run_dir)
    for line in lines:
        assert all(map(meaning, line))
    steps = [step for tree in read_trees(run.run_dir) for step in tree.steps]
    grafts = [step for step in steps if isinstance(step.cause, GraftCause)]
    assert grafts and any(isinstance(step.cause, BranchCause) for step in steps)
    assert {step.cause.source for step in grafts if isinstance(step.cause, GraftCause)} <= {
        "expert",
        "self",
    }
    assert all(step.lesson_ids and not any(step.loss_mask) for step in grafts)
    assert any(step.advantage for step in steps)
    assert sum(line.get("graft/num_grafts", 0) for line in lines) == len(grafts)
    paths = [path for tree in read_trees(run.run_dir) for path in tree.trajectories()]
    assert any(path.leaf.retrieved_frac > 0 for path in paths) and any(
        path.leaf.retrieval_reward for path in paths
    )


def test_law_11_evaluation_neither_retrieves_nor_branches(run: RunResult) -> None:
    files = parts_in(run.run_dir / "trees", "greedy")
    steps = [step for file in files for tree in file.trees() for step in tree.steps]
    assert files and not any(isinstance(step.cause, BranchCause | GraftCause) for step in steps)
    assert not any(Origin.RETRIEVED in step.origins for step in steps)


def test_the_buffer_grows_from_the_agents_best(run: RunResult) -> None:
    with TraceBuffer(run.run_dir / OWN_FILE, None) as buffer:
        own = [trace for trace in buffer if trace.source == "self"]
    assert own
    assert all(trace.reward >= 0.5 and trace.policy_version is not None for trace in own)
    assert read_metrics(run.run_dir)[-1]["buffer/num_own"] == len(own)


def test_law_12_the_same_run_again_whatever_the_tools_latencies(
    run: RunResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = start(run.run_dir.parent, "again")
    assert differing(run.run_dir, again.run_dir) == []
    slow: dict[str, Any] = {
        "tasks": {**tiny(**BOTH)["tasks"], "kind": "tests.support.tiny_parts:SlowWorld"}
    }
    slow["tasks"]["search_world"] = {}
    first = start(run.run_dir.parent, "slow", **slow)
    monkeypatch.setattr(SlowSearch, "longest_s", 0.0)
    second = start(run.run_dir.parent, "quick", **slow)
    assert differing(first.run_dir, second.run_dir) == []
    causes = [type(step.cause) for tree in read_trees(first.run_dir) for step in tree.steps]
    assert BranchCause in causes and GraftCause in causes


def test_law_6_a_resumed_run_rolls_the_buffer_back(run: RunResult, tmp_path: Path) -> None:
    """As if the machine had died after the third update and before its checkpoint."""
    copy = tmp_path / "a"
    shutil.copytree(run.run_dir, copy)
    shutil.rmtree(copy / "checkpoints" / "update-000003")
    with TraceBuffer(copy / OWN_FILE, None) as buffer:
        buffer.add([Trace("w", "x", 1.0, "self", "t", 0, False)], update=3)
    train(None, resume=copy)
    assert differing(run.run_dir, copy) == []


# ---------------------------------------------------------------------- buffers that cannot be used


def made(path: Path, *traces: Trace, encoder: str = "hashing") -> Path:
    with TraceBuffer(path, encoder) as buffer:
        buffer.add(traces)
    return path


TRACE = Trace(
    "e1 r1 ?", StepContent(calls=(ToolCall("search", "e1 r1"),)), 1.0, "expert", "t", 1, False
)


def refused(tmp_path: Path, buffer: dict[str, Any], kind: type[TreegraftError] = DataError) -> str:
    with pytest.raises(kind) as caught:
        start(tmp_path / "runs", "a", buffer=buffer)
    assert not (tmp_path / "runs" / "a").exists()
    return str(caught.value)


def test_buffers_that_cannot_be_used_are_refused_before_the_run(tmp_path: Path) -> None:
    """One without traces, one of another encoder, and encoders that cannot be loaded."""
    empty = {"path": str(made(tmp_path / "empty.sqlite")), "encoder": "hashing"}
    assert "is empty" in refused(tmp_path, empty)
    filled = {"path": str(made(tmp_path / "b.sqlite", TRACE))}
    text = refused(tmp_path, {**filled, "encoder": "minilm"})
    assert "hashing" in text and "minilm" in text
    for buffer in ({"path": "expert"}, filled):
        assert "hashing" in refused(tmp_path, {**buffer, "encoder": "hasing"}, SettingError)
    lost = {"path": "expert", "encoder": "/nowhere/model"}
    assert "no such folder" in refused(tmp_path, lost, ModelError)


@pytest.mark.smoke
def test_a_growing_run_resumes_without_the_file_that_it_copied(tmp_path: Path) -> None:
    path = made(tmp_path / "b.sqlite", TRACE)
    growing = {"path": str(path), "encoder": "hashing", "grow": {"num_best": 1}}
    first = start(tmp_path, "a", buffer=growing, run={"num_updates": 1})
    path.unlink()
    settings = json.loads((first.run_dir / "config.json").read_text())
    settings["run"]["num_updates"] = 2
    assert train(settings, resume=first.run_dir).metrics["buffer/num_traces"] >= 1


@pytest.mark.smoke
def test_a_file_of_trajectories_is_imported_into_the_runs_own_buffer(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    steps = [
        {"thought": "e1", "calls": [{"name": "search", "body": "e1"}], "observations": ["e2"]},
        {"thought": "e2", "answer": "e2"},
    ]
    rows = [
        {"question": "r1 of e1 ?", "task_id": "t", "reward": reward, "steps": steps[: 1 + (n > 0)]}
        for n, reward in enumerate((1.0, 0.5, 0.0))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"path": str(path), "encoder": "hashing"}
    # Two have a reward above 0, of which [buffer.build] keeps the better: one step.
    best = {**settings, "build": {"num_best": 1}, "grow": {"num_best": 0}}
    first = start(tmp_path, "a", buffer=best, run={"num_updates": 1})
    assert first.metrics["buffer/num_traces"] == 1
    path.unlink()
    going_on = json.loads((first.run_dir / "config.json").read_text())
    going_on["run"]["num_updates"] = 2
    assert train(going_on, resume=first.run_dir).metrics["buffer/num_traces"] == 1

    path.write_text('{"question": "r1 of e1 ?"}\n')
    text = refused(tmp_path, settings)
    assert "traces.jsonl, line 1: neither messages, conversations, steps nor text" in text
    assert "there is no file" in refused(tmp_path, {**settings, "path": f"{path}x.jsonl"})


def test_a_buffer_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "treegraft buffer build" in refused(
        tmp_path, {"path": str(tmp_path / "none.sqlite"), "encoder": "hashing"}
    )
    assert "buffer.path" in refused(tmp_path, {"path": "", "encoder": "hashing"}, SettingError)


@pytest.mark.smoke
def test_a_buffer_of_another_task_family_is_used_and_harmless(tmp_path: Path) -> None:
    """Nothing about sums helps with search; the run goes on, and similarity shows it."""
    sums = [
        Trace(
            f"{n} + {n} ?",
            StepContent(thought="e1", calls=(ToolCall("search", "e1"),)),
            1.0,
            "sums",
            f"s/{n}",
            1,
            False,
        )
        for n in range(5)
    ]
    path = made(tmp_path / "sums.sqlite", *sums)
    result = start(
        tmp_path, "a", buffer={"path": str(path), "encoder": "hashing"}, run={"num_updates": 1}
    )
    line = read_metrics(result.run_dir)[-1]
    assert line["rollout/failed_frac"] == 0.0
    assert (
        line["graft/num_grafts"] > 0
        and line["graft/same_task_frac"] == 0.0
        and line["graft/similarity_mean"] < 0.9
    )
    shutil.rmtree(tmp_path / "a")
    high = {"path": str(path), "encoder": "hashing", "min_similarity": 0.95}
    line = read_metrics(start(tmp_path, "a", buffer=high, run={"num_updates": 1}).run_dir)[-1]
    assert (
        # A recipe that asks for grafts and gets none says so.
        line["graft/num_grafts"] == 0
        and line["retrieve/num_asked"] > 0
        and line["retrieve/nothing_frac"] == 1.0
    )


def test_a_buffer_that_changed_since_the_run_began_is_refused(tmp_path: Path) -> None:
    path = made(tmp_path / "b.sqlite", TRACE)
    reading = {"path": str(path), "encoder": "hashing", "grow": {"num_best": 0}}
    first = start(tmp_path, "a", buffer=reading, run={"num_updates": 1})
    made(path, Trace("other", "text", 1.0, "expert", "t", 0, False))
    settings = json.loads((first.run_dir / "config.json").read_text())
    settings["run"]["num_updates"] = 2
    with raises_code("inputs-changed"):
        train(settings, resume=first.run_dir)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Runs leave torch's thread count as they set it; give it back."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_run_whose_name_was_taken_while_it_loaded_goes_on_under_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(*arguments: Any) -> Path:
        found = new_run_path(*arguments)
        RunFolder.create(found, '{"other": 1}')
        return found

    monkeypatch.setattr(runs, "new_run_path", taken)
    shown = io.StringIO()
    tables = {"run": {"dir": str(tmp_path), "num_updates": 0}, "warmup": {"num_steps": 1}}
    result = train(tiny(**{**BOTH, **tables}), display=PlainDisplay(shown))
    other = result.run_dir.with_name(result.run_dir.name.removesuffix("-2"))
    assert result.run_dir != other and result.checkpoint_dir.is_relative_to(result.run_dir)
    assert (result.run_dir / OWN_FILE).is_file() and str(result.run_dir) in shown.getvalue()
    assert (other / "config.json").read_text() == '{"other": 1}' and not any(other.glob("*/*"))
    assert RunResult.read(result.run_dir) == result
