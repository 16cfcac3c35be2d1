"""Pruning of stored trajectories: the arithmetic, one packed tree against separate passes, and
whole buffers."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from studies.pruning.__main__ import main
from studies.pruning.likelihood import Likelihood
from studies.pruning.notes import read_notes
from studies.pruning.steps import (
    Trajectory,
    Weighed,
    circling,
    cut_idle_steps,
    deletions_tree,
    gains_of,
)
from studies.pruning.work import BufferPruning, PruneChoice
from tests.support.error_codes import raises_code
from tests.support.families import build_model
from tests.support.tiny import tiny

from treegraft.core.demonstration import Written, tree_of_paths
from treegraft.core.types import Observation, Origin, StepContent, Task, ToolCall, Tree
from treegraft.runs.display import NoDisplay
from treegraft.settings.load import load_config
from treegraft.settings.policy import LearnSettings
from treegraft.settings.tasks import SearchWorldSettings
from treegraft.tasks.search_world import SearchWorld
from treegraft.traces.buffer import TraceBuffer
from treegraft.traces.keys import OTHER_TASKS, split_steps
from treegraft.traces.store import TraceFile
from treegraft.train import sft

TASK = Task(id="t/0", question="?", reference=("1",))


def written(name: str, *ids: int, result: Sequence[int] = ()) -> Written:
    spans = [(ids or (1,), Origin.POLICY), (tuple(result), Origin.TOOL)]
    return Written(StepContent(calls=(ToolCall(name, ""),)), spans)


def trajectory(*steps: Written) -> Trajectory:
    return Trajectory(task=TASK, prompt_ids=(5, 6), steps=steps)


def names(tree: Tree) -> dict[str, str]:
    return {step.id: step.content.calls[0].name for step in tree.steps[1:]}


# ---------------------------------------------------------------------- arithmetic


def test_every_deletion_is_a_branch() -> None:
    one = trajectory(*map(written, "abcd"))
    tree = deletions_tree(one, [0, 1, 3])
    assert names(tree) == {
        "0.0": "a",
        "0.0.0": "b",
        "0.0.0.0": "d",
        "0.0.1": "d",
        "0.1": "b",
        "0.1.0": "d",
    }
    assert [leaf.step_id for leaf in tree.leaves] == ["0.0.0.0", "0.0.1", "0.1.0"]


def test_gains_by_hand() -> None:
    """With a: b at -1, c at -2; without a: b at -3, c at -4: D_a = -3 - (-7) = 4. With b: c at -2;
    without: c at -1.5: D_b = -0.5."""
    sums = {"0.0": -9.0, "0.0.0": -1.0, "0.0.0.0": -2.0, "0.0.1": -1.5, "0.1": -3.0, "0.1.0": -4.0}
    assert gains_of(sums, 3) == [4.0, -0.5]
    assert gains_of({"0.0": -1.0}, 1) == []


def seen(*results: str) -> list[StepContent]:
    return [StepContent(observations=(Observation(text=one),)) for one in results]


def test_a_walk_ends_with_the_last_result_that_equals_the_one_before_it() -> None:
    assert circling(seen(*"abcbd")) == [range(2, 4)]
    assert circling(seen(*"abacada")) == [range(1, 7)]
    assert circling(seen(*"aabcc")) == [range(1, 2), range(4, 5)]
    assert circling(seen(*"abc")) == []
    # Steps without a result are nowhere.
    assert circling([StepContent(answer="x"), *seen("a"), StepContent(answer="x")]) == []


def test_steps_of_a_circle_are_gone_before_the_rest_is_weighed() -> None:
    """Without x and y, "az" stays, of which a has D = -1 - (-6) = 5."""
    one = trajectory(*map(written, "axyz"))
    score = by_history({"az": -1.0, "a": -10.0, "z": -6.0})
    (found,) = cut_idle_steps([one], score, circles=[[1, 2]])
    assert found == [
        Weighed(0, 5.0, is_cut=False),
        Weighed(1, None, is_cut=True),
        Weighed(2, None, is_cut=True),
        Weighed(3, None, is_cut=False),
    ]


def by_history(table: Mapping[str, float]) -> Any:
    """Scores a step by the names of the path down to it, "ab" for b after a; 0 where unknown."""

    def score(trees: Sequence[Tree]) -> list[dict[str, float]]:
        found = []
        for tree in trees:
            own = names(tree)
            paths = {step.id: tree.path(step.id)[1:] for step in tree.steps[1:]}
            found.append(
                {
                    name: table.get("".join(own[step.id] for step in path), 0.0)
                    for name, path in paths.items()
                }
            )
        return found

    return score


def test_the_worst_goes_first_and_the_rest_is_weighed_again() -> None:
    """Beside the detour x the right step a has D = -1 too; without x it has D = 5, and stays."""
    table = {
        "xaz": -4.0,
        "az": -1.0,
        "xz": -3.0,
        "z": -6.0,
        # a itself: after x -20, at the beginning -10.
        "xa": -20.0,
        "a": -10.0,
    }
    one = trajectory(*map(written, "xaz"))
    # D_x = (-20 - 4) - (-10 - 1) = -13, D_a = -4 - (-3) = -1.
    (found,) = cut_idle_steps([one], by_history(table))
    assert found == [
        Weighed(0, -13.0, is_cut=True),
        Weighed(1, 5.0, is_cut=False),
        Weighed(2, None, is_cut=False),
    ]
    # Below -1 both would go; nothing is below -14.
    assert [one.is_cut for one in cut_idle_steps([one], by_history(table), margin=5.5)[0]] == [
        True,
        True,
        False,
    ]
    assert [one.gain for one in cut_idle_steps([one], by_history(table), margin=-14.0)[0]] == [
        -13.0,
        -1.0,
        None,
    ]


# ---------------------------------------------------------------------- law 1


token_ids = st.lists(st.integers(3, 90), min_size=1, max_size=4)
token_steps = st.tuples(token_ids, st.lists(st.integers(3, 90), max_size=3))


@given(steps=st.lists(token_steps, min_size=2, max_size=5), limit=st.sampled_from([8, 4096]))
@settings(max_examples=5, deadline=None)
def test_law_1_one_packed_tree_gives_the_gains_of_separate_passes(
    steps: list[tuple[list[int], list[int]]], limit: int
) -> None:
    """Also where the tree is split, since it is larger than a pack."""
    path = [written(f"s{n}", *own, result=seen) for n, (own, seen) in enumerate(steps)]
    one = trajectory(*path)
    packed = Likelihood(build_model("llama"), LearnSettings(max_pack_tokens=limit))
    (sums,) = packed([deletions_tree(one, range(len(path)))])
    without = [[*path[: j - 1], *path[j:]] for j in range(1, len(path))]
    paths = [tree_of_paths(TASK, "alone", one.prompt_ids, [kept]) for kept in [path, *without]]
    whole, *alone = (
        [found[step.id] for step in tree.steps[1:]]
        for tree, found in zip(paths, packed(paths), strict=True)
    )
    expected = [sum(whole[j:]) - sum(own[j - 1 :]) for j, own in enumerate(alone, start=1)]
    assert gains_of(sums, len(path)) == pytest.approx(expected, abs=1e-4)


# ---------------------------------------------------------------------- whole buffers


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that has seen a few demonstrations."""
    folder = tmp_path_factory.mktemp("agent")
    config = tiny(
        run={"dir": str(folder), "name": "r"},
        warmup={"num_steps": 6, "decision_frac": 0.0},
        eval={"at_start": False, "at_end": False, "every": 0},
    )
    return sft(config).run_dir


def pruned(recipe: Any, model: Path, source: Path, out: Path, **choice: Any) -> BufferPruning:
    """Prunes a buffer, and returns the work with its report."""
    work = BufferPruning(
        load_config(recipe), PruneChoice(model=str(model), buffer=source, out=out, **choice)
    )
    work.run(display=NoDisplay())
    assert not work.is_stopped
    return work


def world() -> SearchWorld:
    """The tasks of the recipe, and an expert that makes detours."""
    settings = SearchWorldSettings(hops=[1, 2], num_entities=8, num_relations=5, detour_prob=0.5)
    return SearchWorld(settings, seed=3, num_train=12, num_eval=4)


def fill(path: Path, num_samples: int = 2) -> list[tuple[Task, tuple[StepContent, ...]]]:
    made = [
        (task, world().expert(task, n))
        for task in world().train_tasks()
        for n in range(num_samples)
    ]
    with TraceBuffer(path, "hashing") as buffer:
        for number, (task, steps) in enumerate(made):
            name = str(number % num_samples)
            buffer.add(
                split_steps(
                    task.id, task.question, steps, reward=1.0, source="expert", trajectory=name
                )
            )
    return made


def test_what_is_cut_is_kept_in_a_note_and_the_rest_under_new_keys(
    agent: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    filled = enumerate(fill(tmp_path / "a"))
    before = {(task.id, str(n % 2)): steps for n, (task, steps) in filled}
    old = (tmp_path / "a").read_bytes()
    report = pruned(tiny(), agent, tmp_path / "a", tmp_path / "b").report
    assert report.num_weighed == report.num_trajectories == 24
    assert report.num_steps == sum(map(len, before.values()))
    notes = read_notes(TraceFile(tmp_path / "b", create=False))
    with TraceBuffer.open_as_built(tmp_path / "b") as buffer:
        after = {(one[0].task_id, one[0].trajectory): one for one in buffer.trajectories()}
    questions = {task.id: task.question for task in world().train_tasks()}
    num_cut = 0
    for place, steps in before.items():
        note = notes["expert", *place]
        assert [one["position"] for one in note["steps"]] == [*range(len(steps))]
        left = [steps[one["position"]] for one in note["steps"] if not one["is_cut"]]
        expected = split_steps(
            place[0], questions[place[0]], left, reward=1.0, source="expert", trajectory=place[1]
        )
        assert list(after[place]) == expected
        cut = [one for one in note["steps"] if one["is_cut"]]
        assert all(one["gain"] < 0 for one in cut)
        bodies = [one["value"]["calls"][0]["body"] for one in cut]
        assert bodies == [steps[one["position"]].calls[0].body for one in cut]
        num_cut += len(cut)
    assert report.num_cut == num_cut > 0
    with raises_code("buffer-out-taken"):
        pruned(tiny(), agent, tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == old

    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["pruning", "show", str(tmp_path / "b"), "-n", "24"])
    with pytest.raises(SystemExit):
        main()
    shown = capsys.readouterr().out
    assert shown.count(" cut ") == num_cut
    assert "D, nats" in shown and "expert, search_world/train/0, 1, reward 1" in shown
    place = ("search_world/train/3", "0")
    asked = ["pruning", "show", str(tmp_path / "b"), "--task", place[0], "--json"]
    monkeypatch.setattr(sys, "argv", asked)
    with pytest.raises(SystemExit):
        main()
    first, _ = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["pruning"] == notes["expert", *place]

    # One of each task: of two with reward 1 the shorter one, before anything is cut.
    pruned(tiny(), agent, tmp_path / "a", tmp_path / "c", only_best=True, margin=-1000.0)
    with TraceBuffer.open_as_built(tmp_path / "c") as buffer:
        best = {one[0].task_id: len(one) for one in buffer.trajectories()}
    assert best == {task: min(len(before[task, "0"]), len(before[task, "1"])) for task in questions}


def test_what_cannot_be_pruned_is_taken_over_or_refused(agent: Path, tmp_path: Path) -> None:
    (task, steps), *_ = fill(tmp_path / "a")
    assert len(steps) > 1

    def add(contents: Sequence[StepContent], name: str, **fields: Any) -> None:
        traces = split_steps(
            fields.get("task_id", task.id),
            fields.get("question", task.question),
            contents,
            reward=fields.get("reward", 1.0),
            source="other",
            trajectory=name,
        )
        with TraceBuffer.open_as_built(tmp_path / "a") as buffer:
            buffer.add(traces)

    add(steps, "failed", reward=0.0)
    add(steps[:-1], "no answer")
    add(steps, "another question", question="r1 of e1 ?")
    add(steps, "another task", task_id="elsewhere/7")
    two = StepContent(calls=steps[0].calls * 2, observations=steps[0].observations * 2)
    add([two, steps[-1]], "two calls")
    long = StepContent(
        calls=(ToolCall("search", "e1 " * 90),), observations=(Observation(text="e1"),)
    )
    add([long, steps[-1]], "long")
    report = pruned(tiny(), agent, tmp_path / "a", tmp_path / "b").report
    assert report.left == {
        "with a reward not above 0": 1,
        "without an answer at the end": 1,
        OTHER_TASKS: 2,
        "that the recipe's format cannot say": 1,
        "too long for the model": 1,
    }
    with (
        TraceBuffer.open_as_built(tmp_path / "a") as a,
        TraceBuffer.open_as_built(tmp_path / "b") as b,
    ):
        old, new = ([o for o in one.trajectories() if o[0].source == "other"] for one in (a, b))
    assert old == new

    with raises_code("nothing-to-prune"):
        pruned(tiny(run={"seed": 4}), agent, tmp_path / "a", tmp_path / "c")
