"""Branches of agents that own their loop, by replay."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rollout.agents.support import (
    ANSWER,
    CALL,
    TASK,
    chat_format,
    engine_of,
    limits,
    solve,
    user,
)
from tests.rollout.agents.test_grower import check_contexts, scored, shape

from treegraft.core.types import BranchCause, Expand, Start, Status, Step, Tree
from treegraft.explore.entropy import EntropyBranching
from treegraft.explore.independent import Independent
from treegraft.rollout.agents.grower import COUNTED, AgentGrower
from treegraft.rollout.agents.programs import FunctionProgram
from treegraft.rollout.formats.answers import AnswerRule
from treegraft.rollout.formats.chat import ChatFormat
from treegraft.rollout.loop import Grower
from treegraft.settings.explore import EntropySettings
from treegraft.settings.tools import ToolsSettings
from treegraft.tools.function import FunctionTool
from treegraft.tools.toolbox import Toolbox


def arpo(num_starts: int = 1, **more: Any) -> EntropyBranching:
    """Branches wherever a step begins with a higher entropy than the first one."""
    values: dict[str, Any] = {"num_starts": num_starts, "num_branches": 1, "probe_tokens": 4}
    values |= {"base_prob": 0.5, "threshold": 0.5, "entropy_weight": 0.2, "rule": "threshold"}
    return EntropyBranching(EntropySettings(**(values | more)), vocab_size=300)


def calls_then_answers(num: int) -> Callable[[str], str]:
    return lambda text: ANSWER if text.count("= 42") >= num else CALL


def replayed(program: Any, replies: Any, explorer: Any, **more: Any) -> tuple[Tree, dict[str, int]]:
    entropy = more.pop("entropy", 0.5)
    engine = replies if hasattr(replies, "complete") else engine_of(replies, entropy=entropy)
    grower = AgentGrower(
        engine,
        chat_format(),
        None,
        explorer,
        limits(**more),
        scored,
        program=FunctionProgram(program),
        temperature=1.0,
    )
    grown = grower.grow_all([TASK], noise_key=(0,), group_prefix="1", max_live_trees=1)
    (tree,) = asyncio.run(grown)
    check_contexts(tree, engine)
    metrics = grower.take_metrics()
    counts = {name: int(metrics[f"agent/{name}"]) for name in COUNTED}
    num_sampled = sum(step.num_sampled > 0 for step in tree.steps)
    assert len(engine.calls) == num_sampled
    return tree, counts


def rises(text: str) -> float:
    """The agent is unsure after its second result."""
    return 2.0 if text.count("= 42") == 2 else 0.5


def test_a_branch_repeats_the_calls_before_it_without_sampling() -> None:
    tree, counts = replayed(solve, calls_then_answers(3), arpo(), entropy=rises)
    # One start of four calls; entropy rises in its third one, where a second rollout leaves it.
    assert counts == {
        "num_abandoned": 0,
        "num_replays": 1,
        "num_diverged": 0,
        "num_replayed_calls": 2,
    }
    assert shape(tree) == {
        "0": None,
        "0.0": "0",
        "0.0.0": "0.0",
        "0.0.0.0": "0.0.0",
        "0.0.0.0.0": "0.0.0.0",
        "0.0.0.0.0.0": "0.0.0.0.0",
        "0.0.0.0.0.0.0": "0.0.0.0.0.0",
        "0.0.0.0.0.0.0.0": "0.0.0.0.0.0.0",
        "0.0.0.0.0.1": "0.0.0.0.0",
        "0.0.0.0.0.1.0": "0.0.0.0.0.1",
        "0.0.0.0.0.1.0.0": "0.0.0.0.0.1.0",
    }
    branch = next(step for step in tree.steps if isinstance(step.cause, BranchCause))
    assert branch.id == "0.0.0.0.0.1" and branch.before == "0.0.0.0.0"
    decided = {step.id: step.decision for step in tree.steps if step.decision is not None}
    opened = {one: decision.num_opened for one, decision in decided.items()}
    assert opened == {
        "0.0.0.0": 0,
        "0.0.0.0.0.0": 1,
        "0.0.0.0.0.0.0.0": 0,
        "0.0.0.0.0.1.0.0": 0,
    }
    assert [leaf.answer for leaf in tree.leaves] == ["42", "42"]


def native(replies: Any, explorer: Any, **more: Any) -> Tree:
    """The same agent in Treegraft's own loop."""

    async def calculate(text: str) -> str:
        """Computes."""
        return f"{text} = 42"

    tools = [FunctionTool(calculate)]
    form = ChatFormat(
        chat_format()._tokenizer,
        tools,
        require_think=False,
        require_boxed=False,
        system_prompt="",
        answer=AnswerRule(finds_numbers=True),
    )
    caps = ToolsSettings(deadline_s=5.0, max_output_chars=200, cache=False, max_concurrent=8)
    engine = engine_of(replies, entropy=more.pop("entropy"))
    bounds = limits(max_tool_calls=20, **more)
    grower = Grower(engine, form, Toolbox(tools, caps), explorer, bounds, scored)
    return asyncio.run(grower.grow(TASK, noise_key=(0,), group_id="1/t/1"))


def sampled_shape(tree: Tree) -> Any:
    """Nested tuples of (text, whether it is a branch, what was decided), one a sampled step."""
    below: dict[str, list[Step]] = {}
    for step in tree.steps:
        below.setdefault(step.before or "", []).append(step)

    def nested(step_id: str) -> Any:
        found = []
        for step in below.get(step_id, []):
            if step.is_context:
                found += nested(step.id)
                continue
            numbers = None
            if step.decision is not None:
                numbers = (step.decision.num_wanted, step.decision.num_opened)
            is_branch = isinstance(step.cause, BranchCause)
            found.append((is_branch, numbers, step.num_sampled, nested(step.id)))
        return found

    return nested("0")


@settings(max_examples=25, deadline=None)
@given(
    num_calls=st.integers(1, 4),
    entropies=st.lists(st.sampled_from([0.2, 0.5, 0.9]), min_size=5, max_size=5),
    num_starts=st.integers(1, 3),
    num_branches=st.integers(1, 2),
    num_leaves=st.integers(3, 9),
)
def test_the_tree_is_that_of_the_loop_that_we_own(
    num_calls: int, entropies: list[float], num_starts: int, num_branches: int, num_leaves: int
) -> None:
    def entropy(text: str) -> float:
        return entropies[text.count("= 42")]

    def explorer() -> Any:
        return arpo(num_starts, num_branches=num_branches)

    replies = calls_then_answers(num_calls)
    more: dict[str, Any] = {"entropy": entropy, "num_leaves": num_leaves}
    tree, counts = replayed(solve, replies, explorer(), **more)
    wanted = native(replies, explorer(), **more)
    assert sampled_shape(tree) == sampled_shape(wanted)
    assert counts["num_diverged"] == 0
    assert tree.budget.num_sampled_tokens == wanted.budget.num_sampled_tokens
    assert len(tree.leaves) == num_leaves


def with_a_clock(place: str) -> Any:
    """`solve` with a number that is new in each run: in its prompt, or in its tool's results."""
    clock = itertools.count(100)

    async def agent(task: Any, client: Any) -> None:
        await solve(task, client, **{place: f" at {next(clock)}"})

    return agent


def test_an_agent_with_a_clock_gets_rollouts_of_its_own() -> None:
    for place in ("asked", "shown"):
        agent = with_a_clock(place)
        tree, counts = replayed(agent, calls_then_answers(3), arpo(), entropy=rises, num_leaves=3)
        # The first branch became a rollout of its own, and so did that rollout's.
        assert counts["num_diverged"] == counts["num_replays"] == 2, place
        assert counts["num_replayed_calls"] == 0
        assert len(tree.leaves) == 3
        assert all(leaf.status is Status.COMPLETED for leaf in tree.leaves)
        assert not any(isinstance(step.cause, BranchCause) for step in tree.steps)
        # No rollout has a sampled step of another one.
        sampled = [step.id for path in tree.trajectories() for step in path.steps[1:]]
        assert len(sampled) == len(set(sampled)) == 3 * 4


def test_an_agent_that_stops_early_or_crashes_when_repeated_is_started_anew() -> None:
    runs = itertools.count()

    async def agent(task: Any, client: Any) -> str | None:
        if next(runs) == 1:
            return "early"
        return await solve(task, client)

    tree, counts = replayed(agent, calls_then_answers(3), arpo(), entropy=rises)
    assert counts["num_diverged"] == 1
    assert [leaf.answer for leaf in tree.leaves] == ["42", "42"]
    assert next(runs) == 3


def test_requests_at_a_time_are_found_by_their_contexts() -> None:
    """Three subagents at once, in another order in each run, then a question about all."""
    orders = itertools.cycle([("a", "b", "c"), ("c", "a", "b"), ("b", "c", "a")])

    async def agent(task: Any, client: Any) -> str:
        create = client.chat.completions.create
        asked = []
        for name in next(orders):
            asked.append(asyncio.create_task(create(model="m", messages=[user(name)])))
            await asyncio.sleep(0.02)
        await asyncio.gather(*asked)
        await create(model="m", messages=[user("all")])
        return "42"

    def entropy(text: str) -> float:
        return 2.0 if "all" in text else 0.5

    explorer = arpo(num_branches=2)
    tree, counts = replayed(agent, lambda _: ANSWER, explorer, entropy=entropy, num_leaves=3)
    assert counts["num_replays"] == 2 and counts["num_diverged"] == 0
    assert counts["num_replayed_calls"] == 6
    assert len({leaf.step_id.rpartition(".")[0] for leaf in tree.leaves}) == 1


class Once(Independent):
    """One start; then a second child below the step after so many calls."""

    expands = True

    def __init__(self, number: int) -> None:
        self._number = number

    def starts(self, max_leaves: int) -> Start:
        return Start(1)

    def fill(self, tree: Tree, max_leaves: int) -> Any:
        if len(tree.leaves) > 1:
            return super().fill(tree, max_leaves)
        sampled = [step for step in tree.steps if step.num_sampled]
        cause = BranchCause(entropy_change=0.0, probability=1.0, rule="once")
        return [Expand(sampled[self._number].id, 2, cause)]


def test_children_of_finished_steps_are_replays_too() -> None:
    tree, counts = replayed(solve, calls_then_answers(3), Once(1), num_leaves=4)
    assert counts["num_replayed_calls"] == 2 * 2 and counts["num_replays"] == 2
    assert len([s for s in tree.steps if isinstance(s.cause, BranchCause)]) == 2
    assert len(tree.leaves) == 4
    # Nothing follows a last step, so its wish is a fresh start.
    tree, counts = replayed(solve, calls_then_answers(3), Once(3), num_leaves=3)
    assert counts["num_replays"] == 0 and len(tree.leaves) == 3
