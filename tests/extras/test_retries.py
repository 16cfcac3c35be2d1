"""Retries of steps: what the policy is given, and what it is taught."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rollout.test_growth import grow, make
from tests.rollout.test_loop import ANSWER, search
from tests.support.error_codes import raises_code
from tests.support.examples import at_most
from tests.support.families import build_model, byte_tokenizer, word_tokenizer
from tests.support.slow_learner import distance, gradient_of, make_learner, slow_loss
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
    Tree,
)
from treegraft.explore.compose import Composed
from treegraft.explore.graft import HybridRollout
from treegraft.explore.independent import Independent
from treegraft.policy.engine.scripted import ScriptedEngine
from treegraft.rollout.formats.tags import TagsFormat
from treegraft.rollout.loop import Grower
from treegraft.runs.tree_json import tree_from_json, tree_to_json
from treegraft.settings.explore import GraftSettings
from treegraft.settings.policy import LossSettings
from treegraft.tools.function import FunctionTool

NO_ANSWER = "w3 w4"
"""A violation of the format, which earns -1."""


class Again(Independent):
    """Opens rollouts, and once they have ended tries some of their steps again."""

    expands = True
    retries = True
    wants_rewards = True

    def __init__(self, *again: Retry, num_starts: int = 2) -> None:
        self.again = again or (Retry("0.0", 2, "again"),)
        self.num_starts = num_starts

    def starts(self, max_leaves: int) -> Start:
        return Start(self.num_starts)

    def fill(self, tree: Tree, max_leaves: int) -> Any:
        is_done = any(path.is_retry for path in tree.trajectories())
        return Start(0) if is_done else list(self.again)


def fails_first(path: str) -> str:
    """Searches after a thought and then writes nonsense; a forced call it takes up, and answers."""
    if path.endswith("<search>"):
        return "w7 </search>"
    if "w7 w2" in path:
        return ANSWER
    return NO_ANSWER if "<result>" in path else "<think> w5 </think> <search> w1 </search>"


def retries_of(tree: Tree) -> list[Step]:
    return [step for step in tree.steps if isinstance(step.cause, RetryCause)]


# ---------------------------------------------------------------------- the tree


def test_a_retry_keeps_the_thought_and_begins_the_call() -> None:
    engine = ScriptedEngine(fails_first, word_tokenizer())
    tree = grow(make(Again(), engine=engine))
    assert [step.id for step in tree.steps if step.depth == 1] == ["0.0", "0.1", "0.2", "0.3"]
    again = retries_of(tree)
    assert [step.cause for step in again] == [RetryCause(rule="again", beside="0.0")] * 2
    for step in again:
        text = word_tokenizer().decode(list(step.token_ids))
        own = "<think> w5 </think> <search> w7 </search>"
        assert text.split() == f"{own} <result> w7 w2 </result>".split()
        assert (
            step.origins.tolist() == [Origin.FORCED] * 4 + [Origin.POLICY] * 2 + [Origin.TOOL] * 4
        )
        assert step.loss_mask.tolist() == [False] * 4 + [True] * 2 + [False] * 4
        assert step.sampling_logprobs.tolist() == [0.0] * 4 + [-0.5] * 2 + [0.0] * 4
        assert step.origin is Origin.POLICY and step.violation is None
        call = ToolCall("search", "w7")
        assert step.content == StepContent(
            thought="w5", calls=(call,), observations=(Observation(text="w7 w2"),)
        )
    assert [leaf.reward for leaf in tree.leaves] == [-1.0, -1.0, 1.0, 1.0]
    assert [path.start_id for path in tree.trajectories()] == ["0", "0", "0.0", "0.0"]
    # Forced tokens are not sampled: 6 + 2 in each start, 2 + an answer in each retry.
    answer = sum(tree.steps[-1].sampled_mask)
    assert tree.budget.num_sampled_tokens == 2 * (6 + 2) + 2 * (2 + answer)
    assert tree.budget.num_tool_calls == 4
    assert tree_from_json(tree_to_json(tree)) == tree


def test_law_5_a_path_is_what_the_engine_was_given_and_gave() -> None:
    engine = ScriptedEngine(fails_first, word_tokenizer())
    tree = grow(make(Again(), engine=engine))
    asked = {str(call.noise_key[-1]): call for call in engine.calls}
    for path in tree.trajectories():
        before = list(path.steps[0].token_ids)
        for step in path.steps[1:]:
            forced = step.num_by(Origin.FORCED)
            given_ids = list(asked[step.id].prefix_ids)
            assert given_ids == before + list(step.token_ids[:forced])
            # The limit is that of the whole path.
            used = len(given_ids) - len(path.steps[0].token_ids)
            assert asked[step.id].sampling.max_new_tokens == 60 - used
            before += step.token_ids.tolist()


def test_no_retry_without_room() -> None:
    """A start has 13 tokens; the opening has 4, and 16 must be left."""
    assert len(grow(make(Again(), fails_first, max_completion_tokens=20)).leaves) == 4
    assert len(grow(make(Again(), fails_first, max_completion_tokens=19)).leaves) == 2


@pytest.mark.parametrize("made", [CopiedKeyDoor, ReplayedKeyDoor])
def test_retries_in_an_environment_stand_where_the_step_began(made: type) -> None:
    """The last of three moves is made again below the second, and the first one at the prompt."""

    plan = worlds.by_plan(*worlds.WAY_IN)

    def replies(path: str) -> str:
        opening = path.rpartition("<")[2]
        if path.endswith(">") and not opening.startswith("/") and path.rstrip().endswith(opening):
            whole = plan(path.rpartition("<")[0])
            if whole.startswith(f"<{opening}"):
                return whole.removeprefix(f"<{opening}")
        return plan(path)

    explorer = Again(Retry("0.0.0.0", 1, "mine"), Retry("0.0", 1, "mine"), num_starts=1)
    tree = worlds.grow(worlds.make(made, replies, explorer, num_leaves=3))
    assert [step.id for step in retries_of(tree)] == ["0.0.0.1", "0.1"]
    assert worlds.seen(tree) == [["w1 1", "w1 2", "w1 3"]] * 3
    assert [leaf.reward for leaf in tree.leaves] == [1.0] * 3


# ---------------------------------------------------------------------- the rule


def test_an_explorer_that_leads_retries() -> None:
    grafts = HybridRollout(GraftSettings(num_hybrid=1), num_leaves=9)
    assert Composed([Again(), grafts]).retries and not Composed([grafts, Again()]).retries


def retried(*parts: Part) -> Tree:
    """A tree whose steps that begin with f are retries of the first step."""
    tree = build_tree(Part.of("pp", *parts))
    cause = RetryCause(rule="again", beside="0.0")
    steps = [
        replace(step, cause=cause) if step.origins[0] == Origin.FORCED else step
        for step in tree.steps
    ]
    return replace(tree, steps=tuple(steps))


def example() -> Tree:
    return retried(
        Part.of("ssst", Part.of("sst", Part("s", reward=0.0), Part("fffss", reward=1.0))),
        Part("ss", reward=0.0),
        Part.of("ffsst", Part("s", reward=1.0)),
        Part.of("ffst", Part("ss", reward=0.0)),
        Part("ffs", reward=0.0),
    )


def test_retries_are_a_group_of_their_own() -> None:
    """Of rewards 1, 1, 0, 0 the mean is 1/2; the starts have 0, 0 and teach nothing."""
    tree = assign_credit(example(), advantage="dr_grpo")
    assert [leaf.advantage for leaf in tree.leaves] == [0.0, 0.5, 0.0, 0.5, -0.5, -0.5]
    # Together: the mean of 0, 1, 0, 1, 0, 0 is 1/3.
    mixed = assign_credit(example(), advantage="dr_grpo", restarts="together")
    third = pytest.approx(-1 / 3)
    assert [leaf.advantage for leaf in mixed.leaves][::2] == [third, third, third]
    # A retry is our choice, not a branch of the policy's: no leaf weighs less for it.
    weights = [leaf.weight for leaf in assign_credit(tree, leaf_weight="inverse_branching").leaves]
    assert weights == pytest.approx([1 / 6] * 6)


@pytest.mark.parametrize(
    "loss",
    [
        LossSettings(aggregation="sequence-mean"),
        LossSettings(aggregation="token-mean"),
        LossSettings(objective="gspo", clip_low=0.01, clip_high=0.02),
    ],
    ids=["grpo", "dapo", "gspo"],
)
def test_law_1_with_forced_openings(loss: LossSettings) -> None:
    trees = [assign_credit(example())]
    model = build_model("llama")
    twin = build_model("llama")
    learner, descent = make_learner(model, loss)
    _, metrics = learner.learn(trees)
    expected = slow_loss(twin, trees, loss, 7.0)
    expected.backward()
    assert abs(metrics["learn/loss"] - float(expected.detach())) < 1e-6
    assert distance(descent.gradients[0], gradient_of(twin)) < 1e-5


# ---------------------------------------------------------------------- formats

TEXT = st.text("ab z.0é", max_size=8).map(str.strip)


@pytest.mark.parametrize("make_tokenizer", [byte_tokenizer, word_tokenizer])
@given(thought=TEXT, body=TEXT, asks=st.booleans())
@at_most(40)
def test_tags_are_opened_behind_the_thought(
    make_tokenizer: Any, thought: str, body: str, asks: bool
) -> None:
    tokenizer = make_tokenizer()
    form = TagsFormat(tokenizer, [FunctionTool(search)], system_prompt="")
    said = StepContent(thought=thought, answer="a")
    if asks:
        said = StepContent(thought=thought, calls=(ToolCall("search", body),))
    (ids, _), *_ = form.render_step(said)
    opening = form.call_opening(ids, None)
    text = tokenizer.decode(list(opening))
    assert text.endswith("<search>") and opening == form.call_opening(ids, "search")
    if asks:
        assert tokenizer.decode(list(ids)).startswith(text)
    rest = tokenizer.encode(" w7 </search>", add_special_tokens=False)
    parsed = form.parse_step((*opening, *rest))
    assert parsed.violation is None and parsed.content.calls == (ToolCall("search", "w7"),)
    assert parsed.content.thought == form.parse_step(ids).content.thought


def test_what_cannot_be_opened_is_said_before_work_begins() -> None:
    class Mute:
        """A format without openings."""

    parts = make(Independent())
    with raises_code("no-opening"):
        Grower(parts.engine, Mute(), parts.toolbox, Again(), parts.limits, parts.scorer)  # type: ignore[arg-type]
