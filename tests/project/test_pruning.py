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
from studies.pruning import exact
from studies.pruning.__main__ import main
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
from treegraft.policy.learn.likelihood import Likelihood
from treegraft.runs.display import NoDisplay
from treegraft.settings.load import load_config
from treegraft.settings.policy import LearnSettings
from treegraft.settings.tasks import SearchWorldSettings
from treegraft.tasks.search_world import SearchWorld
from treegraft.traces.buffer import TraceBuffer
from treegraft.traces.fill import BufferBuild
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


def test_a_step_that_is_to_stay_stays_and_an_answer_alone_is_not_scored() -> None:
    table = {"xz": -9.0, "z": -1.0}
    one, answer = trajectory(*map(written, "xz")), trajectory(written("z"))
    asked: list[int] = []

    def score(trees: Sequence[Tree]) -> Any:
        asked.append(len(trees))
        return by_history(table)(trees)

    def is_kept(content: StepContent) -> bool:
        return content.calls[0].name == "x"

    kept, alone = cut_idle_steps([one, answer], score, is_kept=is_kept)
    assert kept == [Weighed(0, -8.0, is_cut=False), Weighed(1, None, is_cut=False)]
    assert alone == [Weighed(0, None, is_cut=False)]
    cut, _ = cut_idle_steps([one, answer], score)
    assert cut == [Weighed(0, -8.0, is_cut=True), Weighed(1, None, is_cut=False)]
    # Only the first has anything to weigh, and once it is an answer alone it is done.
    assert asked == [1, 1]


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
    notes = TraceFile(tmp_path / "b", create=False).prunings()
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
    with TraceBuffer(tmp_path / "empty", "hashing"):
        pass
    with raises_code("buffer-empty"):
        pruned(tiny(), agent, tmp_path / "empty", tmp_path / "c")
    with raises_code("buffer-missing"):
        pruned(tiny(), agent, tmp_path / "none", tmp_path / "c")
    add([StepContent(answer="zebra")], "unknown word")
    with raises_code("word-without-token"):
        pruned(tiny(), agent, tmp_path / "a", tmp_path / "c")


def by_searches(*, trajectories: Sequence[Any], **_: Any) -> list[float]:
    """Half of the reward is for a search."""
    return [0.5 + 0.5 * any(step.content.calls for step in one.steps) for one in trajectories]


def test_a_cut_that_lowers_the_recipe_s_reward_is_undone(agent: Path, tmp_path: Path) -> None:
    """Everything is cut where it may be. An answer alone has half of a reward that wants a search,
    and all of one that wants the answer."""
    fill(tmp_path / "a", num_samples=1)
    for funcs, expected in ((["tests.project.test_pruning:by_searches"], 0), (["exact_match"], 12)):
        config = tiny(reward={"funcs": funcs})
        config["reward"].pop("accuracy", None)
        out = tmp_path / f"b{expected}"
        report = pruned(config, agent, tmp_path / "a", out, margin=1e6).report
        assert report.num_shortened == expected
        assert report.left.total() == 12 - expected
        with TraceBuffer.open_as_built(out) as buffer:
            lengths = [len(one) for one in buffer.trajectories()]
        assert (min(lengths) > 1) if expected == 0 else (lengths == [1] * 12)


class Lamp:
    """A lamp has to burn at the end; a look changes nothing."""

    capability = "replay"

    def reset(self, **row: Any) -> None:
        self.burns = False

    def light(self) -> str:
        """Lights the lamp."""
        self.burns = True
        return "e1"

    def look(self) -> str:
        """Looks at the lamp."""
        return "e3" if self.burns else "e2"

    def get_reward(self) -> float:
        return float(self.burns)


def test_in_an_environment_a_cut_that_it_needs_is_undone(tmp_path: Path) -> None:
    """Every step is cut where it may be. Without a look the lamp burns all the same; without the
    light it does not, and a later look shows something else."""
    config = tiny(
        environment={"kind": "tests.project.test_pruning:Lamp"},
        reward={"funcs": ["environment"]},
        warmup={"num_steps": 2, "decision_frac": 0.0},
        tasks={"kind": "tests.project.test_pruning:LampWorld"},
    )
    del config["reward"]["accuracy"], config["tasks"]["search_world"]

    def step(name: str, seen: str) -> StepContent:
        return StepContent(calls=(ToolCall(name, ""),), observations=(Observation(text=seen),))

    answer = StepContent(answer="e1")
    stored = {
        "needless": [step("look", "e2"), step("light", "e1"), answer],
        "seen": [step("light", "e1"), step("look", "e3"), answer],
        "untrue": [step("look", "e5"), step("light", "e1"), answer],
    }
    with TraceBuffer(tmp_path / "a", "hashing") as buffer:
        for name, contents in stored.items():
            buffer.add(
                split_steps("lamp/0", "e1 ?", contents, reward=1.0, source="s", trajectory=name)
            )
    sft({**config, "run": {**config["run"], "dir": str(tmp_path), "name": "lamp"}})
    for kept, expected in ((("light",), 1), ((), 3)):
        out = tmp_path / f"b{expected}"
        report = pruned(
            config, tmp_path / "lamp", tmp_path / "a", out, margin=1e6, kept_tools=kept
        ).report
        with TraceBuffer.open_as_built(out) as buffer:
            found = {one[0].trajectory: [t.value for t in one] for one in buffer.trajectories()}
        assert found["untrue"] == stored["untrue"]
        if kept:
            lit = [step("light", "e1"), answer]
            assert found["needless"] == found["seen"] == lit
            assert report.num_cut == 2
        else:
            assert found == stored and report.num_cut == 0
            assert report.left == {
                "with other results, or a lower reward, without the steps that were cut": 2,
                "with other results in its environment": 1,
            }


def test_walks_in_a_circle_are_cut_on_boards(tmp_path: Path) -> None:
    """An agent that knows nothing, and a margin below which no D lies: circles alone are cut."""
    config = load_config("sokoban", [f"run.dir={tmp_path}", "run.name=a"], smoke=True)
    tables = config.model_dump(mode="json")
    tables["tasks"]["expert_options"] = {"detour_prob": 0.5}
    sft(tables)
    tables["buffer"]["build"] |= {"num_samples": 1, "num_best": 1, "num_tasks": 12}
    BufferBuild(load_config(tables), tmp_path / "raw").run(display=NoDisplay())
    out = tmp_path / "pruned"
    report = pruned(tables, tmp_path / "a", tmp_path / "raw", out, margin=-1e6).report
    assert report.num_shortened > 3 and not report.left
    assert not report.cut_gains

    def lengths(name: str) -> list[tuple[int, int]]:
        with TraceBuffer.open_as_built(tmp_path / name) as buffer:
            paths = [
                [one.value for one in path if isinstance(one.value, StepContent)]
                for path in buffer.trajectories()
            ]
        return [(len(path), sum(len(walk) for walk in circling(path[:-1]))) for path in paths]

    walked = sum(length for _, length in lengths("raw"))
    assert walked == report.num_cut > 0
    assert sum(length for length, _ in lengths("raw")) - walked == sum(
        length for length, walk in lengths("pruned") if walk == 0
    )


class LampWorld:
    """One question."""

    def __init__(self, **_: Any) -> None:
        self.tasks = [Task(id="lamp/0", question="e1 ?", reference=())]

    def train_tasks(self) -> Sequence[Task]:
        return self.tasks

    def eval_tasks(self) -> Sequence[Task]:
        return ()

    def tools(self) -> Sequence[Any]:
        return ()

    def expert(self, task: Task, seed: int) -> tuple[StepContent, ...]:
        return (StepContent(calls=(ToolCall("light", ""),)), StepContent(answer="e1"))

    def early_answer(self, task: Task, steps: Sequence[StepContent]) -> str | None:
        return None

    def warmup_tasks(self, num: int, seed: int) -> Sequence[Task]:
        return [Task(id="lamp/w", question="e1 ?", reference=())] * num

    def vocabulary(self) -> Sequence[str]:
        return ["e1", "e2", "e3", "e5", "?"]

    def report(self) -> Sequence[str]:
        return ()


def test_pruned_buffers_are_counted(tmp_path: Path) -> None:
    """A detour that pruning cuts makes a trajectory exact; a needed call that it cuts, useless."""
    right = {"e3 r0": "r0 of e3 is e5", "e5 r1": "r1 of e5 is e7"}
    detour = {"e3 r0": "r0 of e3 is e5", "e5 r4": "r4 of e5 is e9", "e5 r1": "r1 of e5 is e7"}
    stored = {"0": (detour, right), "1": (right, right), "2": (right, {"e5 r1": right["e5 r1"]})}
    for n, kind in enumerate(("raw", "pruned")):
        with TraceBuffer(tmp_path / f"{kind}.sqlite", "hashing") as buffer:
            for name, both in stored.items():
                steps = [
                    StepContent(
                        calls=(ToolCall("search", body),), observations=(Observation(text=text),)
                    )
                    for body, text in both[n].items()
                ]
                steps.append(StepContent(answer="e7"))
                made = split_steps(
                    "t", "r1 of r0 of e3 ?", steps, reward=1.0, source="x", trajectory=name
                )
                buffer.add(made)
    counts = exact.row(tmp_path / "raw.sqlite", tmp_path / "pruned.sqlite")
    assert counts == (3, 2, 2, 1)
