"""Growing trees: how paths end, what the engine is given, what one bad leaf does to the others; the
numbers about them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.support.error_codes import raises_code
from tests.support.families import word_tokenizer
from tests.support.trees import Part, build_tree

from treegraft.core.errors import EngineError, ToolUnavailable
from treegraft.core.types import (
    BranchCause,
    Origin,
    Start,
    Status,
    StopReason,
    Task,
    Tree,
)
from treegraft.explore.budget import Budget
from treegraft.explore.independent import Independent
from treegraft.policy.engine.scripted import ScriptedEngine
from treegraft.rollout.formats.tags import TagsFormat
from treegraft.rollout.limits import Limits
from treegraft.rollout.loop import Grower
from treegraft.rollout.measure import eval_metrics, pass_at_k, rollout_metrics
from treegraft.settings.tools import ToolsSettings
from treegraft.tools.function import FunctionTool
from treegraft.tools.toolbox import Toolbox

TASKS = [Task(id=f"t/{n}", question=f"w{n}", reference=("w9",)) for n in range(3)]
ANSWER = "<answer>\\boxed{ w9 }</answer>"
SEARCH = "<search>w1</search>"


async def search(query: str) -> str:
    """Looks a word up."""
    return f"{query} w2"


async def leave(tree: Tree) -> Tree:
    """A scorer that gives 1 for an answer and -1 for none."""
    scored = (
        replace(leaf, reward=None if leaf.status is Status.FAILED else 1.0 if leaf.answer else -1.0)
        for leaf in tree.leaves
    )
    return replace(tree, leaves=tuple(scored))


def make_loop(
    replies: Any,
    *,
    tool: Callable[[str], Awaitable[str]] = search,
    engine: Any = None,
    latency_s: Any = None,
    **limits: Any,
) -> tuple[Grower, Any]:
    tool.__name__ = "search"
    tools = [FunctionTool(tool)]
    engine = engine or ScriptedEngine(replies, word_tokenizer(), latency_s=latency_s)
    fields = {
        "num_leaves": 2,
        "temperature": 1.0,
        "max_completion_tokens": 40,
        "max_agent_steps": 4,
        "max_tool_calls": 3,
        "deadline_s": 5.0,
    }
    loop = Grower(
        engine,
        TagsFormat(word_tokenizer(), tools, system_prompt="", require_think=False),
        Toolbox(
            tools,
            ToolsSettings(deadline_s=5.0, max_output_chars=200, cache=False, max_concurrent=8),
        ),
        Independent(),
        Limits(**{**fields, **limits}),
        leave,
    )
    return loop, engine


def grow(loop: Grower, tasks: list[Task] | None = None) -> list[Tree]:
    return asyncio.run(
        loop.grow_all(
            tasks or TASKS[:1], noise_key=(0, "train", 4), group_prefix="4", max_live_trees=2
        )
    )


def by_step(path: str) -> str:
    """Searches once, then answers."""
    return ANSWER if "<result>" in path else SEARCH


# ---------------------------------------------------------------------- how a path ends


def test_a_path_with_a_search_and_an_answer() -> None:
    loop, engine = make_loop(by_step, num_leaves=1)
    tree = grow(loop)[0]
    encode = word_tokenizer().encode
    root, first, last = tree.steps
    assert (tree.group_id, tree.task) == ("4/t/0", TASKS[0])
    assert root.num_by(Origin.PROMPT) == root.num_tokens and root.content.thought == "w0"
    assert [step.id for step in tree.steps] == ["0", "0.0", "0.0.0"]
    wrote = encode(SEARCH, add_special_tokens=False)
    assert list(first.token_ids[: len(wrote)]) == wrote
    shown = word_tokenizer().decode(list(first.token_ids[len(wrote) :]))
    assert shown.split() == ["<result>", "w1", "w2", "</result>"]
    assert first.origins.tolist() == [Origin.POLICY] * 3 + [Origin.TOOL] * 4
    assert first.loss_mask.tolist() == [True] * 3 + [False] * 4
    assert first.content.calls[0].body == "w1" and first.content.observations[0].text == "w1 w2"
    assert last.token_ids[-1] == word_tokenizer().eos_token_id and all(last.loss_mask)
    leaf = tree.leaves[0]
    assert (leaf.status, leaf.answer, leaf.reward) == (Status.COMPLETED, "w9", 1.0)
    assert (first.stop_reason, last.stop_reason) == (StopReason.STOP, StopReason.END)
    budget = tree.budget
    assert (budget.num_leaves, budget.num_tool_calls, budget.num_sampled_tokens) == (
        1,
        1,
        3 + len(last.token_ids),
    )
    assert [call.noise_key for call in engine.calls] == [
        (0, "train", 4, "t/0", "0.0"),
        (0, "train", 4, "t/0", "0.0.0"),
    ]


def ends(replies: Any, **options: Any) -> tuple[Status, StopReason | None, str | None, Tree]:
    loop, _ = make_loop(replies, num_leaves=1, **options)
    tree = grow(loop)[0]
    last = tree.steps[-1]
    assert tree.leaves[0].step_id == last.id
    return tree.leaves[0].status, last.stop_reason, last.violation, tree


def test_out_of_tokens() -> None:
    status, reason, violation, tree = ends(
        lambda _: "<search> w1 w2 w3 w4 w5 w6", max_completion_tokens=5
    )
    assert (status, reason, violation) == (Status.TRUNCATED, StopReason.LENGTH, None)
    assert len(tree.steps[-1].token_ids) == 5


def test_a_result_that_does_not_fit_is_no_part_of_the_path() -> None:
    """Three sampled and four shown tokens: 7 leave no room for a next one, 8 do."""
    status, reason, _, tree = ends(by_step, max_completion_tokens=7)
    assert (status, reason) == (Status.TRUNCATED, StopReason.LENGTH)
    assert set(tree.steps[-1].origins) == {Origin.POLICY} and tree.budget.num_tool_calls == 1
    status, reason, _, tree = ends(by_step, max_completion_tokens=8)
    assert len(tree.steps) == 3 and len(tree.trajectories()[0].completion_ids) == 8


@pytest.mark.parametrize(
    ("limit", "reason", "num_steps", "num_calls"),
    [
        ({"max_agent_steps": 2}, StopReason.AGENT_STEPS, 3, 1),
        ({"max_tool_calls": 2}, StopReason.TOOL_CALLS, 4, 2),
        ({"max_tool_calls": 0}, StopReason.TOOL_CALLS, 2, 0),
    ],
)
def test_out_of_steps_and_out_of_calls(
    limit: dict[str, int], reason: StopReason, num_steps: int, num_calls: int
) -> None:
    status, found, _, tree = ends(lambda _: SEARCH, **limit)
    assert (status, found, len(tree.steps)) == (Status.TRUNCATED, reason, num_steps)
    assert tree.budget.num_tool_calls == num_calls == tree.trajectories()[0].num_tool_calls


@pytest.mark.parametrize(
    "reply", ["w1 w2", "<result>w1</result>", f"w1 {ANSWER}", "<answer>w9</answer>"]
)
def test_what_the_format_does_not_allow(reply: str) -> None:
    status, _, violation, tree = ends(lambda _: reply)
    assert status is Status.FORMAT_VIOLATION and violation
    assert tree.leaves[0].reward == -1.0 and tree.leaves[0].answer is None
    assert all(tree.steps[-1].loss_mask)


def test_a_step_whose_engine_leaves_the_end_token_out_says_what_it_lacks() -> None:
    status, _, violation, _ = ends(lambda _: "<think> w1 </think>")
    assert status is Status.FORMAT_VIOLATION
    assert violation == "ended without a tool call or an answer"


# ---------------------------------------------------------------------- failures of ours


def failing_at(path_part: str, error: Exception) -> Callable[[str], str]:
    """Answers; where the path holds `path_part`, fails."""

    def reply(path: str) -> str:
        if path_part in path:
            raise error
        return ANSWER

    return reply


@pytest.mark.parametrize(
    "error", [EngineError("the server is gone"), RuntimeError("a user's engine broke")]
)
def test_a_failing_engine_is_data_on_its_leaf(error: Exception) -> None:
    loop, _ = make_loop(failing_at("w1", error), num_leaves=2)
    trees = grow(loop, TASKS)
    statuses = [[leaf.status for leaf in tree.leaves] for tree in trees]
    assert statuses == [[Status.COMPLETED] * 2, [Status.FAILED] * 2, [Status.COMPLETED] * 2]
    leaf = trees[1].leaves[0]
    step = trees[1].steps[1]
    assert (
        leaf.error == f"{type(error).__name__}: {error}"
        and leaf.reward is None
        and not leaf.has_loss
    )
    assert step.num_tokens == 0 and step.stop_reason is StopReason.ERROR


def test_an_unavailable_tool_fails_its_leaf_after_what_was_done() -> None:
    calls = 0

    async def flaky(query: str) -> str:
        """Looks a word up, once."""
        nonlocal calls
        calls += 1
        if calls > 1:
            raise ToolUnavailable("the index is down")
        return query

    loop, _ = make_loop(
        ["<search>w1</search>", "<search>w2</search>", ANSWER], tool=flaky, num_leaves=1
    )
    tree = asyncio.run(loop.grow(TASKS[0], noise_key=(0,), group_id="g"))
    assert [step.id for step in tree.steps] == ["0", "0.0", "0.0.0"]
    assert tree.leaves[0].status is Status.FAILED and "the index is down" in str(
        tree.leaves[0].error
    )
    assert tree.steps[1].num_tokens and not tree.steps[2].num_tokens


def test_law_8_a_hanging_leaf_ends_at_its_deadline_and_blocks_nobody() -> None:
    async def reply(path: str) -> str:
        if "w1" in path:
            await asyncio.sleep(60.0)
        return ANSWER

    loop, _ = make_loop(reply, num_leaves=2, deadline_s=1.5)
    done: list[tuple[int, str]] = []

    async def work() -> list[Tree]:
        return await asyncio.wait_for(
            loop.grow_all(
                TASKS,
                noise_key=(0,),
                group_prefix="0",
                max_live_trees=3,
                on_tree=lambda count, tree: done.append((count, tree.task.id)),
            ),
            20.0,
        )

    trees = asyncio.run(work())
    assert [tree.task.id for tree in trees] == ["t/0", "t/1", "t/2"]
    assert [count for count, _ in done] == [1, 2, 3] and done[-1][1] == "t/1"
    assert [leaf.status for leaf in trees[1].leaves] == [Status.FAILED] * 2
    assert "rollout.deadline_s = 1.5 s" in str(trees[1].leaves[0].error)
    assert all(
        leaf.status is Status.COMPLETED for tree in (trees[0], trees[2]) for leaf in tree.leaves
    )


def test_if_all_fail_it_is_an_error() -> None:
    loop, _ = make_loop(failing_at("w", EngineError("the server is gone")))
    with raises_code("all-failed"):
        grow(loop, TASKS)


# ---------------------------------------------------------------------- laws 5 and 12


def test_the_watch_says_what_is_waited_for() -> None:
    seen: list[dict[str, int]] = []

    def reply(path: str) -> str:
        seen.append(dict(loop.watch.waits))
        return by_step(path)

    loop, _ = make_loop(reply, num_leaves=2)
    grow(loop)
    assert all(counts["engine"] >= 1 for counts in seen)
    assert not any(loop.watch.waits.values())


def test_a_budget_grants_what_is_left() -> None:
    budget = Budget(5)
    assert [budget.grant(Start(n)) for n in (3, 4, 1, -1)] == [3, 2, 0, 0]
    budget.spend(num_tool_calls=2, num_sampled_tokens=7)
    budget.spend(num_sampled_tokens=1)
    state = budget.state
    assert (state.num_leaves, state.num_tool_calls, state.num_sampled_tokens) == (5, 2, 8)


# ---------------------------------------------------------------------- numbers about trees


def scored(
    *outcomes: tuple[float | None, bool | None], task_id: str = "t/1", category: str = ""
) -> Tree:
    """A flat tree with rewards and correctness; a reward of None is a failed leaf."""
    parts = tuple(
        Part("ss", status=Status.COMPLETED if reward is not None else Status.FAILED)
        for reward, _ in outcomes
    )
    tree = build_tree(Part("ppp", parts), task_id=task_id)
    leaves = tuple(
        replace(
            leaf,
            reward=reward,
            is_correct=is_correct,
            reward_parts={} if reward is None else {"math": reward * 2},
        )
        for leaf, (reward, is_correct) in zip(tree.leaves, outcomes, strict=True)
    )
    return replace(tree, task=replace(tree.task, category=category), leaves=leaves)


def test_rollout_metrics_by_hand() -> None:
    first = scored((1.0, True), (0.0, False), (None, None))
    second = scored((0.5, False))
    branch = replace(
        second.steps[1], cause=BranchCause(entropy_change=0.1, probability=0.5, rule="x")
    )
    second = replace(second, steps=(second.steps[0], branch))
    metrics = rollout_metrics([first, second])
    assert metrics["reward/mean"] == 0.5  # of the groups' means 0.5 and 0.5
    assert metrics["reward/std"] == pytest.approx(
        0.5**0.5 / 2
    )  # sqrt(1/2) and 0 for a group of one
    assert metrics["reward/math"] == pytest.approx((2.0 + 0.0 + 1.0) / 3)
    assert metrics["rollout/num_trajectories"] == 4.0
    assert metrics["rollout/failed_frac"] == 0.25 and metrics["rollout/completed_frac"] == 0.75
    assert metrics["rollout/accuracy"] == pytest.approx(1 / 3)
    assert metrics["branch/num_branches"] == 1.0
    grafted = build_tree(Part.of("pppp", Part.of("rrr", Part("stttt")), Part("ss")))
    assert (
        rollout_metrics([grafted])["rollout/retrieved_frac"] == 0.3
    )  # 3 of 10 tokens after the prompt
    assert rollout_metrics([])["reward/mean"] == 0.0


def test_pass_at_k_by_hand() -> None:
    """Of 4 samples 1 is right: of the 6 pairs 3 hold it."""
    assert pass_at_k(4, 1, 1) == 0.25 and pass_at_k(4, 1, 2) == 0.5 and pass_at_k(4, 1, 4) == 1.0
    assert pass_at_k(4, 0, 3) == 0.0 and pass_at_k(4, 3, 2) == 1.0
    for k in (0, 5):
        with pytest.raises(ValueError, match=f"k is {k}; expected 1..4"):
            pass_at_k(4, 1, k)


def test_evaluations_by_hand() -> None:
    greedy = [
        scored((1.0, True), task_id="a", category="1 hop"),
        scored((0.0, False), task_id="b", category="2 hops"),
        scored((None, None), task_id="c", category="2 hops"),
        scored((1.0, True), task_id="d", category="2 hops"),
    ]
    sampled = [
        scored((1.0, True), (0.0, False), task_id="a"),
        scored((0.0, False), (0.0, False), task_id="b"),
    ]
    metrics = eval_metrics(greedy, sampled)
    assert metrics["eval/accuracy"] == 0.5  # a failed one counts as wrong
    assert metrics["eval/accuracy_1_hop"] == 1.0 and metrics[
        "eval/accuracy_2_hops"
    ] == pytest.approx(1 / 3)
    assert (
        metrics["eval/accuracy_sampled"] == 0.25
        and metrics["eval/pass_at_2"] == 0.5
        and "eval/pass_at_4" not in metrics
    )
    assert metrics["eval/failed_frac"] == pytest.approx(1 / 8)
    assert "eval/accuracy" not in eval_metrics(None, sampled)


def test_categories_share_a_number_where_they_share_a_name_and_take_none_of_another_pass() -> None:
    trees = [
        scored((float(is_right), is_right), task_id=category, category=category)
        for category, is_right in (("two hops", True), ("two_hops", False), ("sampled", True))
    ]
    metrics = eval_metrics(trees, trees[1:2])
    assert metrics["eval/accuracy_two_hops"] == 0.5
    assert (metrics["eval/accuracy_sampled"], metrics["eval/accuracy__sampled"]) == (0.0, 1.0)
