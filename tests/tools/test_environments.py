"""Stateful environments: each trajectory has its own, branches begin in the state of their step,
failures stay on their leaf."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rollout.test_growth import OneTrace
from tests.support.error_codes import raises_code
from tests.support.examples import at_most
from tests.support.worlds import (
    CopiedKeyDoor,
    Counter,
    Forgetful,
    Hanging,
    KeyDoor,
    LockedKeyDoor,
    OneThread,
    ReplayedKeyDoor,
)

from treegraft.core.types import (
    Observation,
    Status,
    StepContent,
    Task,
    ToolCall,
    Trace,
    Tree,
)
from treegraft.explore.entropy import EntropyBranching
from treegraft.explore.graft import HybridRollout
from treegraft.explore.independent import Independent
from treegraft.policy.engine.scripted import ScriptedEngine
from treegraft.policy.tiny import build_word_tokenizer
from treegraft.rollout.formats.tags import TagsFormat
from treegraft.rollout.limits import Limits
from treegraft.rollout.loop import Grower
from treegraft.settings.explore import EntropySettings, GraftSettings
from treegraft.settings.tools import EnvironmentSettings, ToolsSettings
from treegraft.tasks.rewards import RewardScorer, environment_reward
from treegraft.tools.build import open_environments
from treegraft.tools.environments import sessions
from treegraft.tools.environments.own import ClassEnvironments, EnvironmentTool, capability_of
from treegraft.tools.environments.sessions import Environments
from treegraft.tools.toolbox import Toolbox

TASK = Task(id="t/0", question="w0", reference=(), columns={"key": "w3"})
ANSWER = "<answer>\\boxed{ w9 }</answer>"
WAY_IN = ("<take>w3</take>", "<unlock>w5</unlock>", "<enter>w5</enter>")


@functools.cache
def word_tokenizer() -> Any:
    tags = [
        f"<{slash}{name}>"
        for name in ("take", "unlock", "enter", "add", "double", "look", "ask")
        for slash in ("", "/")
    ]
    return build_word_tokenizer(
        [*tags, *(f"w{n}" for n in range(10)), *map(str, range(200)), "ValueError:", "no", "here"]
    )


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    KeyDoor.live.clear()
    Hanging.released.clear()
    yield
    Hanging.released.set()
    assert KeyDoor.live == []


def environments(
    made: type, *, deadline_s: float = 5.0, options: dict[str, Any] | None = None, **fields: Any
) -> Environments:
    chosen = EnvironmentSettings(
        kind="tests.support.worlds:X", deadline_s=deadline_s, options=options or {}, **fields
    )
    return Environments(ClassEnvironments(made, made.__name__, chosen), chosen)


def make_toolbox(
    worlds: Environments, *, deadline_s: float = 5.0, max_output_chars: int = 200
) -> Toolbox:
    return Toolbox(
        worlds.kind.tools,
        ToolsSettings(
            deadline_s=deadline_s, max_output_chars=max_output_chars, cache=True, max_concurrent=8
        ),
        environments=worlds,
    )


def make(
    made: type,
    replies: Any,
    explorer: Any = None,
    *,
    retriever: Any = None,
    entropy: Any = 0.5,
    latency_s: Any = None,
    call_deadline_s: float = 5.0,
    options: dict[str, Any] | None = None,
    world: dict[str, Any] | None = None,
    **limits: Any,
) -> Grower:
    worlds = environments(made, options=options, **(world or {}))
    fields = {
        "num_leaves": 2,
        "temperature": 1.0,
        "max_completion_tokens": 120,
        "max_agent_steps": 8,
        "max_tool_calls": 6,
        "deadline_s": 10.0,
    }
    format = TagsFormat(word_tokenizer(), worlds.kind.tools, system_prompt="", require_think=False)
    rewards = [("environment", environment_reward, 1.0)]
    return Grower(
        ScriptedEngine(replies, word_tokenizer(), entropy=entropy, latency_s=latency_s),
        format,
        make_toolbox(worlds, deadline_s=call_deadline_s),
        explorer or Independent(),
        Limits(**{**fields, **limits}),
        RewardScorer(rewards, written_text=format.written_text),
        retriever=retriever,
    )


def grow(grower: Grower, task: Task = TASK) -> Tree:
    return asyncio.run(
        grower.grow_all([task], noise_key=(0, "train", 4), group_prefix="4", max_live_trees=1)
    )[0]


def by_plan(*plan: str) -> Callable[[str], str]:
    """Writes the steps of a plan one after another, then answers."""

    def reply(path: str) -> str:
        done = path.count("<result>")
        return plan[done] if done < len(plan) else ANSWER

    return reply


def seen(tree: Tree) -> list[list[str]]:
    """What each trajectory was told, call by call."""
    return [
        [one.text for content in path.contents for one in content.observations]
        for path in tree.trajectories()
    ]


def counts(grower: Grower) -> dict[str, int]:
    metrics = grower.toolbox.take_metrics()
    return {
        key.partition("/")[2]: int(value)
        for key, value in metrics.items()
        if key.startswith("environment/")
    }


# ---------------------------------------------------------------------- one trajectory


def test_each_trajectory_has_an_object_of_its_own() -> None:
    """Moves are counted from 1 in both; the way in is worth 1."""
    grower = make(KeyDoor, by_plan(*WAY_IN))
    tree = grow(grower)
    assert seen(tree) == [["w1 1", "w1 2", "w1 3"]] * 2
    assert [(leaf.reward, leaf.environment_reward, leaf.is_correct) for leaf in tree.leaves] == [
        (1.0, 1.0, True)
    ] * 2
    assert counts(grower) == {
        "num_opened": 2,
        "num_forks": 0,
        "num_replays": 0,
        "num_replayed_calls": 0,
        "num_mismatches": 0,
        "num_failures": 0,
        "num_rehearsals": 0,
        "num_graft_tries": 0,
        "num_graft_calls": 0,
        "num_untrue_grafts": 0,
    }


def test_the_first_observation_stands_in_the_prompt() -> None:
    tree = grow(make(KeyDoor, by_plan(), num_leaves=1))
    assert tree.task.question == "w0\nw3" and tree.root.content.thought == "w0\nw3"
    assert word_tokenizer().decode(list(tree.root.token_ids)).split()[:2] == ["w0", "w3"]
    assert grow(make(Counter, by_plan(), num_leaves=1)).task is TASK


def test_what_the_agent_does_wrong_is_an_observation_and_part_of_the_state() -> None:
    tree = grow(
        make(
            KeyDoor,
            by_plan("<take>w4</take>", "<take>w3</take>", "<unlock>w5</unlock>"),
            num_leaves=1,
        )
    )
    assert seen(tree) == [["ValueError: no w4 here", "w1 2", "w1 3"]]
    assert tree.leaves[0].reward == 0.5 and tree.leaves[0].is_correct is False


def test_reset_is_told_the_columns_it_names() -> None:
    row = EnvironmentTool.reset_arguments(
        Task(
            id="t/1",
            question="q",
            reference=("a",),
            columns={"key": "w4", "question": "other", "seed": 3},
        )
    )
    assert row == {
        "key": "w4",
        "question": "q",
        "prompt": "q",
        "reference": ["a"],
        "task_id": "t/1",
        "seed": 3,
    }
    assert (
        EnvironmentTool.reset_arguments(TASK)["seed"]
        == EnvironmentTool.reset_arguments(TASK)["seed"]
        != EnvironmentTool.reset_arguments(Task(id="t/2", question="", reference=()))["seed"]
    )


def test_an_object_is_used_in_one_thread() -> None:
    tree = grow(make(OneThread, by_plan("<ask>w4</ask>", "<ask>w5</ask>")))
    assert seen(tree) == [["w4", "w5"]] * 2 and [leaf.reward for leaf in tree.leaves] == [2.0, 2.0]


def test_copies_of_its_own_fork_are_used_in_its_thread() -> None:
    class Forked(OneThread):
        def fork(self) -> Forked:
            self.ask("w3")
            return Forked()

    before = threading.enumerate()

    async def story() -> list[float]:
        one = environments(Forked).kind.make()
        await one.reset(TASK)
        two = await one.fork()
        await one.close()
        three = await two.fork()
        found = [await copy.reward() for copy in (two, three)]
        new = [one for one in threading.enumerate() if one not in before]
        (thread,) = [one for one in new if one.name == "treegraft-environment"]
        await two.close()
        await three.close()
        thread.join(30)
        assert not thread.is_alive()
        return found

    assert asyncio.run(story()) == [2.0, 2.0]


class NoThread(OneThread):
    is_blocking = False

    def __init__(self) -> None:
        super().__init__()
        assert threading.current_thread() is threading.main_thread()

    @property
    def done(self) -> bool:
        assert threading.get_ident() == self.thread
        return False


def test_an_object_that_never_blocks_is_used_without_a_thread() -> None:
    tree = grow(make(NoThread, by_plan("<ask>w4</ask>", "<ask>w5</ask>")))
    assert seen(tree) == [["w4", "w5"]] * 2 and [leaf.reward for leaf in tree.leaves] == [2.0, 2.0]


def test_a_truncated_trajectory_earns_what_its_state_is_worth() -> None:
    tree = grow(make(KeyDoor, by_plan(*WAY_IN), max_tool_calls=2, num_leaves=1))
    assert (tree.leaves[0].status, tree.leaves[0].reward) == (Status.TRUNCATED, 0.5)


# ---------------------------------------------------------------------- branches


def unsure_after_two(path: str) -> float:
    """Entropy rises after the second result alone."""
    return 2.0 if path.count("<result>") == 2 else 0.5


KINDS = (KeyDoor, CopiedKeyDoor, ReplayedKeyDoor)


@pytest.mark.parametrize("made", KINDS)
def test_a_branch_begins_in_the_state_of_its_step(made: type) -> None:
    """One start takes the key, unlocks, and grows unsure; it and its branches each make move 3 on
    their own."""
    explorer = EntropyBranching(
        EntropySettings(num_starts=1, num_branches=2, probe_tokens=2, normaliser="none"),
        vocab_size=100,
    )
    grower = make(made, by_plan(*WAY_IN), explorer, entropy=unsure_after_two, num_leaves=3)
    tree = grow(grower)
    assert [step.id for step in tree.steps[1:]] == [
        "0.0",
        "0.0.0",
        "0.0.0.0",
        "0.0.0.0.0",
        "0.0.0.1",
        "0.0.0.1.0",
        "0.0.0.2",
        "0.0.0.2.0",
    ]
    assert seen(tree) == [["w1 1", "w1 2", "w1 3"]] * 3
    assert [leaf.reward for leaf in tree.leaves] == [1.0] * 3
    assert tree.budget.num_tool_calls == 5
    found = counts(grower)
    # Two branches of one point: one copy for the point, which the last branch takes, one for the
    # other.
    expected = {"num_opened": 3, "num_replays": 2, "num_replayed_calls": 4, "num_forks": 0}
    if made is not ReplayedKeyDoor:
        expected = {"num_opened": 1, "num_replays": 0, "num_replayed_calls": 0, "num_forks": 2}
    assert {key: found[key] for key in expected} == expected


def test_steps_behind_too_many_calls_do_not_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, num_replays in ((1, 0), (2, 1)):
        monkeypatch.setattr(sessions, "MAX_REPLAY_CALLS", limit)
        explorer = EntropyBranching(
            EntropySettings(num_starts=1, probe_tokens=2, normaliser="none"), vocab_size=100
        )
        grower = make(
            ReplayedKeyDoor,
            by_plan(*WAY_IN),
            explorer,
            entropy=unsure_after_two,
        )
        tree = grow(grower)
        assert len(tree.leaves) == 2 and all(leaf.reward == 1.0 for leaf in tree.leaves)
        assert counts(grower)["num_replays"] == num_replays


def test_a_replay_that_finds_something_else_fails_its_own_leaf() -> None:
    plan = by_plan("<take>w3</take>", "<unlock>w5</unlock>")
    grower = make(
        Forgetful,
        plan,
        EntropyBranching(
            EntropySettings(num_starts=1, probe_tokens=2, normaliser="none"), vocab_size=100
        ),
        entropy=unsure_after_two,
    )
    tree = grow(grower)
    assert [leaf.status for leaf in tree.leaves] == [Status.COMPLETED, Status.FAILED]
    error = tree.leaves[1].error or ""
    assert "replayed call 2 of 2, unlock 'w5'" in error and "the first time" in error
    assert counts(grower)["num_mismatches"] == 1


def test_the_whole_result_is_compared_not_what_was_shown() -> None:
    """The agent sees 16 characters of 400; a replay that differs in the last one is no replay."""
    ends = iter("ab")

    class Long:
        capability = "replay"

        def reset(self) -> None: ...

        def look(self) -> str:
            """Looks."""
            return "w1 " * 133 + next(ends)

    async def work() -> None:
        worlds = environments(Long)
        box = make_toolbox(worlds, max_output_chars=16)
        async with box.sessions(TASK) as sessions:
            await sessions.prepare(1)
            session = await sessions.start(0).open()
            assert (await session.call(ToolCall("look", ""))).is_truncated
            with raises_code("replay-differs", match="replayed call 1 of 1"):
                await session.mark().open()

    asyncio.run(work())


# ---------------------------------------------------------------------- grafts


def content_of(*pairs: tuple[str, str, str]) -> StepContent:
    return StepContent(
        calls=tuple(ToolCall(name, body) for name, body, _ in pairs),
        observations=tuple(Observation(text=t) for *_, t in pairs),
    )


def graft_of(*pairs: tuple[str, str, str]) -> OneTrace:
    value = content_of(*pairs)
    return OneTrace(
        Trace(
            key="w0",
            value=value,
            reward=1.0,
            source="expert",
            task_id="t/9",
            position=1,
            terminal=False,
        )
    )


@pytest.mark.parametrize("made", KINDS)
def test_a_graft_is_done_in_the_environment_before_it_is_shown(made: type) -> None:
    """The agent takes the key, the graft unlocks the door, the agent goes in: as move 3 of one
    world."""
    explorer = HybridRollout(GraftSettings(num_hybrid=1, probability=1.0), num_leaves=1)

    def reply(path: str) -> str:
        if "<result>" not in path:
            return "<take>w3</take>"
        return ANSWER if "<enter>" in path else "<enter>w5</enter>"

    grower = make(made, reply, explorer, num_leaves=1, retriever=graft_of(("unlock", "w5", "w1 2")))
    tree = grow(grower)
    assert [step.origin.name for step in tree.steps[1:]] == [
        "POLICY",
        "RETRIEVED",
        "POLICY",
        "POLICY",
    ]
    assert seen(tree) == [["w1 1", "w1 2", "w1 3"]] and tree.leaves[0].reward == 1.0
    assert counts(grower)["num_untrue_grafts"] == 1  # unlocking again would be move 4


@pytest.mark.parametrize("made", KINDS)
def test_the_nearest_steps_are_tried_until_one_comes_true(made: type) -> None:
    """After one move: each candidate is tried in a copy of its own, unless a result that is known
    contradicts it."""
    key = ("take", "w3")
    lock = ("unlock", "w5")
    go = ("enter", "w5")
    steps = [
        content_of((*lock, "w2 2")),  # a copy: unlocked is "w1 2"
        content_of((*lock, "w1 9")),  # known by now
        content_of((*lock, "w1 2"), (*go, "w2 3")),  # a second copy
        content_of((*key, "w1 2"), (*lock, "w1 4")),  # a third
        content_of((*lock, "w1 2"), (*go, "w1 3"), (*key, "w1 4")),  # a fourth
    ]

    async def work(num: int) -> tuple[int | None, list[str], dict[str, int]]:
        worlds = environments(made)
        box = make_toolbox(worlds)
        async with box.sessions(TASK) as sessions:
            await sessions.prepare(1)
            session = await sessions.start(0).open()
            await session.call(ToolCall(*key))
            found = await session.rehearse([[step] for step in steps[:num]])
            told = [(await session.call(ToolCall(*lock))).text]
            if found is not None:
                told.append((await found[1].call(ToolCall(*lock))).text)
        names = ("rehearsals", "graft_tries", "graft_calls", "untrue_grafts")
        usage = {name: getattr(worlds.counts, f"num_{name}") for name in names}
        usage["copies"] = worlds.counts.num_forks + worlds.counts.num_replays
        return None if found is None else found[0], told, usage

    def counted(*numbers: int) -> dict[str, int]:
        names = ("rehearsals", "graft_tries", "graft_calls", "untrue_grafts", "copies")
        return dict(zip(names, numbers, strict=True))

    # The state of the agent's own session is the same whatever was tried.
    assert asyncio.run(work(1)) == (None, ["w1 2"], counted(1, 1, 1, 1, 1))
    assert asyncio.run(work(2)) == (None, ["w1 2"], counted(1, 2, 1, 1, 1))
    assert asyncio.run(work(4)) == (None, ["w1 2"], counted(1, 4, 5, 1, 3))
    assert asyncio.run(work(5)) == (4, ["w1 2", "w1 5"], counted(1, 5, 8, 0, 4))


def test_a_graft_without_acts_changes_nothing_and_a_text_is_never_believed() -> None:
    async def work() -> tuple[bool, Any]:
        box = make_toolbox(environments(KeyDoor))
        async with box.sessions(TASK) as sessions:
            await sessions.prepare(1)
            session = await sessions.start(0).open()
            thought = StepContent(
                thought="hm",
                calls=(ToolCall("search", "w1"),),
                observations=(Observation(text=""),),
            )
            same = await session.rehearse([["a text"], [thought]])
            assert same is not None
            return same[0] == 1 and same[1] is session, await session.rehearse([["a text"]])

    assert asyncio.run(work()) == (True, None)


# ---------------------------------------------------------------------- failures of ours


@pytest.mark.parametrize(
    ("where", "part"),
    [
        ("reset", "reset: no end within environment.deadline_s = 1 s"),
        ("look", "look did not end within tools.deadline_s"),
        ("get_reward", "get_reward: no end within environment.deadline_s"),
        ("nan", "get_reward returned nan"),
        ("raise", "get_reward: OSError: the judge is away"),
    ],
)
def test_an_environment_that_hangs_or_fails_is_a_failed_leaf(where: str, part: str) -> None:
    class Second(Hanging):
        """Only the second object made misbehaves."""

        num_made = 0

        def __init__(self) -> None:
            Second.num_made += 1
            super().__init__(where=where if Second.num_made == 2 else "")

    grower = make(
        Second,
        by_plan("<look></look>"),
        # The other objects have to be ready in that time on a busy machine too.
        world={"deadline_s": 1.0},
        call_deadline_s=1.0,
        num_leaves=3,
    )
    began = time.monotonic()
    tree = grow(grower)
    # Less than the object hangs.
    assert time.monotonic() - began < 15
    failed = [leaf for leaf in tree.leaves if leaf.status is Status.FAILED]
    assert len(failed) == 1 and part in (failed[0].error or "") and failed[0].reward is None
    assert [leaf.reward for leaf in tree.leaves if leaf not in failed] == [1.0, 1.0]
    assert counts(grower)["num_failures"] == 1


def test_a_copy_that_fails_is_a_failed_branch() -> None:
    class Unique(KeyDoor):
        def fork(self) -> KeyDoor:
            raise OSError("no disk")

    grower = make(
        Unique,
        by_plan(*WAY_IN),
        EntropyBranching(
            EntropySettings(num_starts=1, probe_tokens=2, normaliser="none"), vocab_size=100
        ),
        entropy=unsure_after_two,
    )
    tree = grow(grower)
    assert [(leaf.step_id, leaf.status) for leaf in tree.leaves] == [
        ("0.0.0.0.0", Status.COMPLETED),
        ("0.0.0.1", Status.FAILED),
    ]
    assert "fork: OSError: no disk" in (tree.leaves[1].error or "")


def test_a_beginning_that_differs_is_refused() -> None:
    class Fickle(ReplayedKeyDoor):
        num_made = 0

        def reset(self, **row: Any) -> str:
            Fickle.num_made += 1
            super().reset(**row)
            return f"w{Fickle.num_made}"

    grower = make(Fickle, by_plan(), num_leaves=2)
    tree = grow(grower)
    assert [leaf.status for leaf in tree.leaves].count(Status.FAILED) == 1
    assert "expected a beginning that depends on the row alone" in next(
        leaf.error or "" for leaf in tree.leaves if leaf.error
    )
    assert counts(grower)["num_mismatches"] == 1


def test_a_first_observation_that_fits_no_prompt_fails_the_leaves() -> None:
    class Endless(ReplayedKeyDoor):
        def reset(self, **row: Any) -> str:
            super().reset(**row)
            return "w1 " * 100

    grower = make(Endless, by_plan())
    grower.format = TagsFormat(
        word_tokenizer(), environments(Endless).kind.tools, system_prompt="", max_context=50
    )
    with raises_code("all-failed"):
        grow(grower)


def test_the_threads_of_a_tree_end_with_it() -> None:
    before = threading.enumerate()
    grow(make(KeyDoor, by_plan(*WAY_IN), num_leaves=6))
    for thread in threading.enumerate():
        if thread not in before:
            thread.join(30)
            assert not thread.is_alive(), thread


# ---------------------------------------------------------------------- the three ways agree

ACTS = st.sampled_from([("take", "w3"), ("take", "w4"), ("unlock", "w5"), ("enter", "w5")])
SHAPES = st.lists(st.tuples(st.integers(0, 30), st.lists(ACTS, max_size=3)), min_size=1, max_size=8)
"""A random tree: each entry opens a branch at an earlier place (modulo how many there are) and acts
there."""


async def walk(
    made: type, shape: Sequence[tuple[int, Sequence[tuple[str, str]]]]
) -> list[tuple[list[str], float | None]]:
    """What each branch of a random tree was told on its whole way, and what it earned."""
    box = make_toolbox(environments(made))
    found = []
    async with box.sessions(TASK) as sessions:
        await sessions.prepare(1)
        points: list[tuple[Any, list[str]]] = [(sessions.start(0), [])]
        # A beginning is opened once; every later branch comes from a mark.
        for number, (place, acts) in enumerate(shape):
            point, told = points[place % len(points)] if number else points.pop()
            point.reserve(10)
            session = await point.open()
            told = list(told)
            for name, body in acts:
                points.append((session.mark(), list(told)))
                told.append((await session.call(ToolCall(name, body))).text)
            points.append((session.mark(), list(told)))
            found.append((told, await session.reward()))
            session.release()
    await box.close()
    return found


def from_scratch(
    shape: Sequence[tuple[int, Sequence[tuple[str, str]]]],
) -> list[tuple[list[str], float]]:
    """The same, each branch's whole way on a plain object of its own."""
    ways: list[list[tuple[str, str]]] = [[]]
    found = []
    for number, (place, acts) in enumerate(shape):
        way = list(ways[place % len(ways)] if number else ways.pop())
        for act in acts:
            ways.append(list(way))
            way.append(act)
        ways.append(list(way))
        world = KeyDoor()
        told = []
        world.reset()
        for name, body in way:
            try:
                told.append(getattr(world, name)(body))
            except ValueError as error:
                told.append(f"ValueError: {error}")
        found.append((told, world.get_reward()))
        world.close()
    return found


@at_most(25)
@given(SHAPES)
def test_fork_copy_and_replay_see_what_a_fresh_run_sees(
    shape: list[tuple[int, list[tuple[str, str]]]],
) -> None:
    expected = from_scratch(shape)
    for made in KINDS:
        assert asyncio.run(walk(made, shape)) == expected
    assert KeyDoor.live == []


# ---------------------------------------------------------------------- settings


def test_capabilities() -> None:
    def found(made: type, capability: str = "auto") -> str:
        return environments(made, capability=capability).kind.capability.value

    assert [found(made) for made in (KeyDoor, ReplayedKeyDoor, LockedKeyDoor, Counter)] == [
        "fork",
        "replay",
        "none",
        "none",
    ]
    assert (
        found(Counter, "replay") == "replay"
        and capability_of(Hanging, "", EnvironmentSettings()) == "fork"
    )


@pytest.mark.parametrize(
    ("kind", "options", "code"),
    [
        ("tests.support.worlds:random", {}, "environment-invalid"),
        ("tests.support.worlds:Nothing", {}, "import-name-missing"),
        ("builtins:dict", {}, "environment-without-reset"),
    ],
)
def test_what_is_no_environment(kind: str, options: dict[str, Any], code: str) -> None:
    with raises_code(code):
        open_environments(EnvironmentSettings(kind=kind, options=options))
