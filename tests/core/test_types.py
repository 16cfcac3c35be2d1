"""The data types: worked examples by hand, what they refuse, the flat lists of a trajectory."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.examples import at_most
from tests.support.trees import Part, build_tree, random_trees

from treegraft.core.columns import FILLERS
from treegraft.core.types import LEARNING_RULES, Leaf, Origin, Status, Step, StepContent, Tree

P = Origin.PROMPT
S = Origin.POLICY
T = Origin.TOOL


def make_step(**fields: Any) -> Step:
    values: dict[str, Any] = {
        "id": "0.0",
        "parent": "0",
        "depth": 1,
        "token_ids": (7, 8, 9),
        "origins": (S, S, T),
        "loss_mask": (True, True, False),
        "sampling_logprobs": (-0.1, -0.2, 0.0),
        "entropies": (0.4, 0.5, 0.0),
    }
    return Step(**{**values, **fields})


def example() -> Tree:
    """The tree drawn at the head of types.py, tokens numbered 1 to 15 in depth-first order."""
    part = Part.of("pppp", Part.of("ssstt", Part("ss", reward=1.0)), Part("ssss", reward=0.0))
    return build_tree(part, tokens=range(1, 16))


def test_the_example_of_the_page() -> None:
    first, second = example().trajectories()
    assert first.token_ids == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert second.token_ids == [1, 2, 3, 4, 12, 13, 14, 15]
    assert first.prompt_ids == second.prompt_ids == [1, 2, 3, 4]
    assert first.completion_ids == [5, 6, 7, 8, 9, 10, 11]
    assert first.sampled_mask == [False] * 4 + [True] * 3 + [False] * 2 + [True] * 2
    assert first.loss_mask == first.sampled_mask
    assert first.origins == [P] * 4 + [S] * 3 + [T] * 2 + [S] * 2
    assert (first.reward, second.reward) == (1.0, 0.0)
    assert (first.status, second.status) == (Status.COMPLETED, Status.COMPLETED)
    assert first.logprobs == first.sampling_logprobs
    assert [len(values) for values in (first.logprobs, first.entropies)] == [11, 11]


def test_a_leaf_without_loss_takes_it_from_its_own_path_only() -> None:
    tree = example()
    first, second = replace(
        tree, leaves=(replace(tree.leaves[0], has_loss=False), tree.leaves[1])
    ).trajectories()
    assert not any(first.loss_mask) and sum(first.sampled_mask) == 5
    assert sum(second.loss_mask) == 4


@pytest.mark.parametrize(
    "column", ["origins", "loss_mask", "sampling_logprobs", "entropies", "old_logprobs", "ratios"]
)
def test_columns_of_another_length_are_refused(column: str) -> None:
    values = {"origins": (S, S), "loss_mask": (True, True)}.get(column, (0.0, 0.0))
    with pytest.raises(ValueError, match=f"step '0.0': {column} has 2 entries, token_ids has 3"):
        make_step(**{column: values})


@pytest.mark.parametrize("origin", [origin for origin in Origin if origin is not Origin.POLICY])
def test_law_4_no_loss_but_on_sampled_tokens(origin: Origin) -> None:
    with pytest.raises(
        ValueError, match=f"token 2: loss on a token of origin {origin.name.lower()}"
    ):
        make_step(origins=(S, S, origin), loss_mask=(True, True, True))


@given(random_trees())
@at_most(40)
def test_law_4_on_random_trees(tree: Tree) -> None:
    for path in tree.trajectories():
        columns = (path.sampled_mask, path.loss_mask, path.origins, path.logprobs, path.entropies)
        assert {len(column) for column in columns} == {len(path.token_ids)}
        for sampled, has_loss, origin in zip(
            path.sampled_mask, path.loss_mask, path.origins, strict=True
        ):
            assert sampled == (origin is Origin.POLICY)
            assert sampled or not has_loss
        assert path.token_ids == path.prompt_ids + path.completion_ids


def test_the_status_table() -> None:
    """Rows of the table in design.md 3; a failed leaf counts nowhere."""
    table = {
        status: (rule.in_group, rule.in_denominator, rule.has_loss)
        for status, rule in LEARNING_RULES.items()
    }
    counts = (True, True, True)
    nowhere = (False, False, False)
    assert table == {
        Status.COMPLETED: counts,
        Status.TRUNCATED: counts,
        Status.FORMAT_VIOLATION: counts,
        Status.FAILED: nowhere,
    }


def test_trees_that_are_none_are_refused() -> None:
    tree = example()
    root, first, second, third = tree.steps
    with pytest.raises(ValueError, match="depth-first order"):
        replace(tree, steps=(root, third, first, second))
    with pytest.raises(ValueError, match="depth-first order"):
        replace(tree, steps=(first, second), leaves=())
    with pytest.raises(ValueError, match="depth-first order"):
        replace(tree, steps=(), leaves=())
    with pytest.raises(ValueError, match=r"step '0\.0\.0' has no parent"):
        replace(tree, steps=(root, second, third), leaves=())
    with pytest.raises(ValueError, match=r"leaf '0\.0' must be a step without children"):
        replace(tree, leaves=(Leaf(step_id="0.0", status=Status.COMPLETED),))
    with pytest.raises(ValueError, match=r"leaf '0\.7' must be"):
        replace(tree, leaves=(Leaf(step_id="0.7", status=Status.COMPLETED),))


def test_a_step_knows_its_author_and_its_place() -> None:
    assert make_step().origin is S and make_step().sampled_mask.tolist() == [True, True, False]
    assert make_step(id="0.2.10").ordinals == (0, 2, 10)
    empty = make_step(token_ids=(), origins=(), loss_mask=(), sampling_logprobs=(), entropies=())
    assert empty.origin is Origin.FORCED


def test_tool_calls_count_those_that_ran() -> None:
    from treegraft.core.types import Observation, ToolCall

    tree = example()
    call = ToolCall("search", "x")
    seen = Observation(text="y")
    ran = replace(tree.steps[1], content=StepContent(calls=(call,), observations=(seen,)))
    refused = replace(tree.steps[2], content=StepContent(calls=(call,)))
    first, second = replace(tree, steps=(tree.steps[0], ran, refused, tree.steps[3])).trajectories()
    assert (first.num_tool_calls, second.num_tool_calls) == (1, 0)
    assert [content.calls for content in first.contents] == [(call,), (call,)]


# ---------------------------------------------------------------------- columns

SHORT = st.floats(width=32)
"""Numbers that float32 holds, infinities and NaN among them."""


@st.composite
def columns(draw: st.DrawFn) -> dict[str, Any]:
    """The columns of a step: scores as engines give them, of sampled tokens alone or of any."""
    origins = tuple(draw(st.lists(st.sampled_from(Origin), max_size=9)))
    ids = st.integers(0, draw(st.sampled_from((100, 65_535, 65_536, 2**31, 2**40))))
    score = draw(st.sampled_from((SHORT, st.floats())))
    everywhere = draw(st.booleans())
    found: dict[str, Any] = {
        "token_ids": tuple(draw(ids) for _ in origins),
        "lesson_ids": tuple(draw(st.lists(ids, max_size=3))),
        "origins": origins,
        "loss_mask": tuple(one is Origin.POLICY and draw(st.booleans()) for one in origins),
    }
    for name, filler in FILLERS.items():
        scored = [everywhere or one is Origin.POLICY for one in origins]
        # The sign of a zero of a token that was not sampled is not kept.
        drawn = [draw(score) if is_scored else filler for is_scored in scored]
        pairs = zip(drawn, origins, strict=True)
        found[name] = tuple(one if by is Origin.POLICY else one + 0.0 for one, by in pairs)
        if name in ("old_logprobs", "ratios", "credit_factors") and draw(st.booleans()):
            found[name] = None
    return found


@given(columns())
def test_columns_read_as_they_were_given(given: dict[str, Any]) -> None:
    """To the letter (NaN is not equal to itself), whatever way a step is copied; a copy with other
    fields has these and shares the other columns."""
    step = make_step(**given)

    def text(one: Step) -> dict[str, str]:
        read = {name: getattr(one, name) for name in given}
        return {
            name: repr(tuple(values.tolist()) if isinstance(values, np.ndarray) else values)
            for name, values in read.items()
        }

    said = {name: repr(values) for name, values in given.items()}
    said["origins"] = repr(tuple(map(int, given["origins"])))
    assert text(step) == said
    assert step.num_tokens == len(given["token_ids"])
    assert step.sampled_mask.tolist() == [one is Origin.POLICY for one in given["origins"]]
    assert step.num_sampled == sum(step.sampled_mask.tolist())
    for again in (replace(step), copy.deepcopy(step), pickle.loads(pickle.dumps(step))):
        assert text(again) == said
    written = [one for one in given["origins"] if one is not Origin.FORCED]
    assert step.origin is (written[0] if written else Origin.FORCED)
    changed = replace(step, policy_version=7, old_logprobs=None)
    assert text(changed) == said | {"old_logprobs": "None"} and changed.policy_version == 7
    assert changed.token_ids is step.token_ids and changed.entropies is step.entropies
    assert text(step) == said and step.policy_version == 0


def test_columns_cannot_be_written_to() -> None:
    own = np.array([7, 8, 9])
    step = make_step(token_ids=own)
    own[0] = 1
    assert step.token_ids.tolist() == [7, 8, 9]
    with pytest.raises(ValueError, match="read-only"):
        step.token_ids[0] = 1


def test_steps_are_equal_by_their_values() -> None:
    step = make_step(old_logprobs=(-0.25, -0.5, 0.0))
    again = replace(step, token_ids=np.array([7, 8, 9], np.int64))
    assert again == step and hash(again) == hash(step) and {step: 1}[again] == 1
    assert step != replace(step, old_logprobs=None) != step
    assert step != replace(step, entropies=(0.4, 0.25, 0.0)) and step != "a step"
