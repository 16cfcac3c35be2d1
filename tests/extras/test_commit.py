"""Commit branching: where it goes on, what the policy is given there, and what it learns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.extras.test_retries import retried, retries_of
from tests.rollout.test_growth import grow, make
from tests.rollout.test_loop import ANSWER, SEARCH, search
from tests.support.families import build_model, byte_tokenizer, word_tokenizer
from tests.support.slow_learner import distance, make_learner
from tests.support.trees import Part, build_tree
from tests.support.worlds import CopiedKeyDoor, ReplayedKeyDoor
from tests.tools import test_environments as worlds

from treegraft.algo.advantages import assign_credit
from treegraft.core.types import (
    Observation,
    Origin,
    Retry,
    RetryCause,
    Start,
    Step,
    StepContent,
    ToolCall,
    Trajectory,
    Tree,
)
from treegraft.explore.build import build_explorer
from treegraft.extras.methods.commit import CommitBranching, CommitSettings
from treegraft.policy.learn.pack import num_imitated_tokens
from treegraft.rollout.formats.tags import TagsFormat
from treegraft.settings.load import load_config
from treegraft.settings.policy import LossSettings
from treegraft.tools.function import FunctionTool

BOXES = ("\\boxed{ w3 }", "\\boxed{ w9 }")
WRONG = f"<answer>{BOXES[0]}</answer>"


def commit(num_retries: int = 2, **fields: Any) -> CommitBranching:
    explorer = CommitBranching(CommitSettings(**{"num_starts": 2, **fields}))
    explorer.num_retries = num_retries
    return explorer


def finished(*rewards: tuple[float, float | None, float]) -> Tree:
    """For each rollout its reward, the entropy of its call (None: it answers at once), and of its
    answer."""
    parts = [
        Part("ss", reward=reward, entropies=[last, last])
        if call is None
        else Part.of("sst", Part("ss", reward=reward, entropies=[last] * 2), entropies=[call] * 2)
        for reward, call, last in rewards
    ]
    tree = build_tree(Part.of("pp", *parts))
    leaves = {leaf.step_id for leaf in tree.leaves}

    def said(step: Step) -> Step:
        if step.id in leaves:
            return replace(step, content=StepContent(answer="1"))
        if step.depth:
            seen = (Observation(text="x"),)
            content = StepContent(calls=(ToolCall("search", "x"),), observations=seen)
            return replace(step, content=content)
        return step

    return replace(tree, steps=tuple(map(said, tree.steps)))


def gives_up(path: str) -> str:
    """Answers at once, and wrongly before its third result; a call that is begun it takes up."""
    if path.endswith("<search>"):
        return "w1 </search>"
    return ANSWER if path.count("<result>") == 3 else WRONG


def places(tree: Tree) -> list[str]:
    """Where each retry stands."""
    causes = [step.cause for step in retries_of(tree)]
    return [cause.beside for cause in causes if isinstance(cause, RetryCause)]


async def by_answer(tree: Tree) -> Tree:
    rewards = {path.leaf.step_id: float(path.leaf.answer == "w9") for path in tree.trajectories()}
    leaves = (replace(leaf, reward=rewards[leaf.step_id]) for leaf in tree.leaves)
    return replace(tree, leaves=tuple(leaves))


def grown(explorer: CommitBranching, replies: Callable[[str], str], num_leaves: int) -> Tree:
    grower = make(explorer, replies, num_leaves=num_leaves)
    grower.scorer = by_answer
    return grow(grower)


# ---------------------------------------------------------------------- the tree


def test_it_goes_on_deeper_until_a_rollout_succeeds() -> None:
    """Two starts, then two retries in each of three rounds: beside the first answer, beside an
    answer after one result, beside one after two. The third round answers rightly, and 4 of 12
    leaves stay unused."""
    tree = grown(commit(), gives_up, 12)
    assert Counter(places(tree)) == {"0.0": 2, "0.2.0": 2, "0.2.1.0": 2}
    assert sorted(leaf.reward or 0.0 for leaf in tree.leaves) == [0.0] * 6 + [1.0] * 2
    # Each round makes one call for each of its leaves, and none again.
    assert tree.budget.num_tool_calls == 6
    opening = word_tokenizer().encode("<search>")
    for step in retries_of(tree):
        assert list(step.lesson_ids) == opening
        assert step.origins[: len(opening)].tolist() == [Origin.FORCED] * len(opening)
        assert not any(step.loss_mask[: len(opening)])
    assert all(not step.lesson_ids for step in tree.steps if step not in retries_of(tree))


def goes_too_far(path: str) -> str:
    """Answers after its fourth result; the answer after the second is the right one."""
    if path.endswith("<answer>"):
        return f"{BOXES[path.count('<result>') == 2]}</answer>"
    return SEARCH if path.count("<result>") < 4 else WRONG


def test_it_answers_after_the_results_that_nobody_answered_after() -> None:
    """Each start makes four calls and answers wrongly. Beside its second, third and fourth call an
    answer is begun, and the one after two results is right; no call is made for them."""
    tree = grown(commit(), goes_too_far, 12)
    assert Counter(places(tree)) == {"0.0.0": 1, "0.0.0.0": 1, "0.0.0.0.0": 1}
    rewards = {path.leaf.step_id: path.reward for path in tree.trajectories() if path.is_retry}
    # Beside the second call stands the answer after one result, and so on.
    assert rewards == {"0.0.1": 0.0, "0.0.0.1": 1.0, "0.0.0.0.1": 0.0}
    assert tree.budget.num_tool_calls == 8
    opening = word_tokenizer().encode("<answer>")
    assert all(list(step.lesson_ids) == opening for step in retries_of(tree))
    # Without answers it goes on where the agent has answered.
    deeper = grown(commit(answers=False), goes_too_far, 12)
    assert set(places(deeper)) == {"0.0.0.0.0.0", "0.1.0.0.0.0"}


def decides_in_thoughts(path: str) -> str:
    """Thinks w1 before a search and w2 before an answer, and does what it has thought; the answer
    after its third result is right."""
    num = path.count("<result>")
    thought = path.rpartition("<think>")[2].split()
    if "<think>" in path and not path.endswith(">"):
        action = SEARCH if thought == ["w1"] else WRONG
        return f"</think>{ANSWER if num == 3 and thought == ['w2'] else action}"
    if path.endswith("<search>"):
        return "w1 </search>"
    return f"<think> w1 </think>{SEARCH}" if num == 0 else f"<think> w2 </think>{WRONG}"


def test_a_step_that_is_begun_anew_drops_its_thought() -> None:
    """Beside the answer "w2, answer" stands "w1", as the tree's own search begins, and the policy
    writes the search; with the thought kept it searches behind "w2"."""
    words = word_tokenizer()
    for form, opening in (("anew", "<think> w1"), ("kept", "<think> w2 </think> <search>")):
        grower = make(
            commit(form=form, num_starts=1, num_retries=1),
            decides_in_thoughts,
            num_leaves=3,
            max_completion_tokens=200,
        )
        grower.scorer = by_answer
        tree = grow(grower)
        assert places(tree) == ["0.0.0", "0.0.1.0"], form
        for step in retries_of(tree):
            forced = step.num_by(Origin.FORCED)
            assert words.decode(step.token_ids[:forced]).split() == opening.split()
            assert step.lesson_ids == tuple(step.token_ids[:forced].tolist())
            assert step.content.thought == ("w1" if form == "anew" else "w2")
            assert step.content.calls[0].name == "search" and step.violation is None
        # Not a third time: the leaves are used up before the third result.
        assert tree.budget.num_tool_calls == 3


def calling(names: Sequence[str], **fields: Any) -> Any:
    """What commit branching does with rollouts that each call a tool of these names and then
    answer wrongly."""
    tree = finished(*[(0.0, 0.5, 0.1)] * len(names))
    calls = {f"0.{number}": name for number, name in enumerate(names)}
    steps = [
        replace(step, content=replace(step.content, calls=(ToolCall(calls[step.id], "x"),)))
        if step.id in calls
        else step
        for step in tree.steps
    ]
    explorer = commit(answers=False, **fields)
    return explorer.fill(replace(tree, steps=tuple(steps)), 99)


def test_calls_of_every_tool_are_begun() -> None:
    """Each tool that was called, in turn."""
    both = calling(["search", "find"], num_retries=3)
    assert [(one.tool, one.num) for one in both] == [("search", 2), ("find", 1)]
    assert [(one.tool, one.num) for one in calling(["search", "find"], num_retries=1)] == [
        ("search", 1),
        ("find", 1),
    ]
    assert [one.tool for one in calling(["search", "search"])] == [None]


@pytest.mark.parametrize("num_leaves", [2, 3, 5])
def test_no_more_leaves_than_the_budget(num_leaves: int) -> None:
    tree = grown(commit(), lambda path: WRONG, num_leaves)
    assert len(tree.leaves) == num_leaves


def test_an_agent_that_needs_no_help_gets_none() -> None:
    assert len(grown(commit(), lambda path: ANSWER, 12).leaves) == 2


@pytest.mark.parametrize("made", [CopiedKeyDoor, ReplayedKeyDoor])
def test_in_an_environment_it_stands_where_the_step_began(made: type) -> None:
    """Two of three moves earn half, an answer after the first one nothing, and
    the third move in place of the answer all: there the door is unlocked."""
    plan = worlds.by_plan(*worlds.WAY_IN[:2])

    def replies(path: str) -> str:
        if path.endswith("<answer>"):
            return worlds.ANSWER.removeprefix("<answer>")
        return "w5</enter>" if path.endswith("<enter>") else plan(path)

    class Entering(CommitBranching):
        def _tools(self, members: Sequence[Trajectory]) -> list[str | None]:
            return ["enter"]

    explorer = Entering(CommitSettings(num_starts=1))
    explorer.num_retries = 1
    tree = worlds.grow(worlds.make(made, replies, explorer, num_leaves=4))
    assert places(tree) == ["0.0.0.0", "0.0.0"]
    assert sorted(leaf.reward or 0.0 for leaf in tree.leaves) == [0.0, 0.5, 1.0]
    assert sorted(worlds.seen(tree)) == [["w1 1"], ["w1 1", "w1 2"], ["w1 1", "w1 2", "w1 3"]]


# ---------------------------------------------------------------------- the rule


def test_which_place_comes_next() -> None:
    """By calls, then by entropy, then by place; answers that were tried are not tried again."""
    explorer = commit(num_retries=3, answers=False)
    # One call and then an answer; or an answer at once.
    lost = finished((0.0, 0.5, 0.1), (0.0, None, 9.0), (0.0, 0.5, 0.7), (0.0, 0.5, 0.7))
    assert explorer.fill(lost, 99) == [Retry("0.2.0", 3, "commit", is_lesson=True)]
    assert explorer.fill(lost, 6) == [Retry("0.2.0", 2, "commit", is_lesson=True)]
    assert explorer.fill(lost, 4) == Start(0)
    cause = RetryCause(rule="commit", beside="0.2.0")
    steps = [replace(one, cause=cause) if one.id == "0.0" else one for one in lost.steps]
    again = replace(lost, steps=tuple(steps))
    assert explorer.fill(again, 99) == [Retry("0.3.0", 3, "commit", is_lesson=True)]


def test_a_success_ends_it() -> None:
    explorer = commit()
    assert explorer.fill(finished((0.0, 0.5, 0.1), (1.0, 0.5, 0.1)), 9) == Start(0)
    assert explorer.fill(finished((1.0, 0.5, 0.1), (1.0, None, 0.1)), 9) == Start(0)
    assert commit(num_more=9).fill(finished((0.0, 0.5, 0.1), (1.0, 0.5, 0.1)), 9) == Start(7)
    assert commit(num_more=9).fill(finished((1.0, 0.5, 0.1), (1.0, 0.5, 0.1)), 9) == Start(0)
    assert commit(num_more=3).fill(finished((0.0, 0.5, 0.1), (1.0, 0.5, 0.1)), 9) == Start(3)
    assert commit(num_more=3).fill(finished(*[(0.0, 0.5, 0.1), (1.0, 0.5, 0.1)] * 2), 9) == Start(0)
    # Once retries have begun, further starts would be paid for without need.
    won = retried(Part("ss", reward=0.0), Part.of("ffst", Part("s", reward=1.0)))
    assert explorer.fill(won, 9) == Start(0)


# ---------------------------------------------------------------------- what is learned


def taught(lesson: int = 2) -> Tree:
    """Two starts that fail, and of two retries one that succeeds."""
    tree = retried(
        Part("ss", reward=0.0),
        Part("sss", reward=0.0),
        Part.of("ffst", Part("s", reward=1.0), lesson=lesson),
        Part.of("ffsst", Part("ss", reward=0.0), lesson=lesson),
    )
    return assign_credit(tree, advantage="dr_grpo", restarts="together")


def test_all_leaves_are_compared_and_winning_openings_are_imitated() -> None:
    """Of rewards 0, 0, 1, 0 the mean is 1/4. Of the two openings the one that paid is learned."""
    tree = taught()
    assert [leaf.advantage for leaf in tree.leaves] == [-0.25, -0.25, 0.75, -0.25]
    assert num_imitated_tokens(tree) == 2
    config = load_config({"explore": {"explorers": ["commit"]}})
    assert config.credit.restarts == "together" and config.loss.graft_coef == 0


def test_the_gradient_of_an_opening_is_that_of_imitation() -> None:
    """With c = 0.5, A = 3/4 and one group of four leaves, the opening's two tokens add -c A
    (log π_1 + log π_2) w / (|y| groups), with w = 1/4 and |y| = 2 (sequence-mean)."""
    values = []
    for coef in (0.0, 0.5):
        model = build_model("llama")
        learner, descent = make_learner(model, LossSettings(graft_coef=coef))
        _, metrics = learner.learn([taught()])
        values.append((metrics["learn/loss"], descent.gradients[0]))
    tree = taught()
    step = next(one for one in tree.steps if one.id == "0.2")
    prefix = tree.steps[0].token_ids.tolist()
    logprobs = sequence_logprobs(build_model("llama"), prefix, list(step.lesson_ids))
    expected = -0.5 * 0.75 * logprobs * 0.25 / 2
    assert values[1][0] - values[0][0] == pytest.approx(expected, rel=1e-4)
    assert distance(values[1][1], values[0][1]) > 1e-3


def sequence_logprobs(model: Any, prefix: list[int], ids: list[int]) -> float:
    with torch.no_grad():
        logits = model(torch.tensor([prefix + ids])).logits[0].log_softmax(-1)
    return float(sum(logits[len(prefix) - 1 + n, one] for n, one in enumerate(ids)))


# ---------------------------------------------------------------------- formats and bad input


@given(thought=st.text("ab z.0é", max_size=8).map(str.strip), asks=st.booleans())
def test_an_answer_is_opened_behind_the_thought(thought: str, asks: bool) -> None:
    tokenizer = byte_tokenizer()
    form = TagsFormat(tokenizer, [FunctionTool(search)], system_prompt="")
    said = StepContent(thought=thought, answer="a")
    if asks:
        said = StepContent(thought=thought, calls=(ToolCall("search", "b"),))
    (ids, _), *_ = form.render_step(said)
    opening = form.answer_opening(ids)
    # What comes before the call, or the answer, and the tag.
    rest = tokenizer.encode("\\boxed{a}</answer>", add_special_tokens=False)
    found = form.parse_step([*opening, *rest, *form_end(tokenizer)])
    assert (found.content.thought, found.content.answer) == (thought, "a")
    assert found.violation is None or not thought


def form_end(tokenizer: Any) -> list[int]:
    return [tokenizer.eos_token_id]


def test_half_of_its_starts_may_graft() -> None:
    tables = {"explorers": ["commit", "graft"], "num_leaves": 16, "graft": {"num_hybrid": 8}}
    explore = load_config({"explore": tables, "buffer": {"path": "expert"}}).explore
    explorer: Any = build_explorer(explore, vocab_size=2)
    assert explorer.starts(16).num == explore.commit.num_starts == 4
    assert [number for number in range(4) if explorer.is_hybrid(number)] == [2, 3]
