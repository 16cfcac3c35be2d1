"""Advantages and leaf weights by hand, and law 3 on random trees."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.examples import at_most
from tests.support.trees import Part, build_tree, mixed_trees, random_trees

from treegraft.algo.advantages import assign_credit, leaf_weights
from treegraft.algo.groups import group_advantages, whitened
from treegraft.core.types import Leaf, Status, Tree


def test_grpo_by_hand() -> None:
    """Rewards 1, 0, 0, 1: mean 1/2, sample variance (4 · 1/4) / 3 = 1/3."""
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    assert group_advantages([1, 0, 0, 1]).tolist() == pytest.approx(
        [expected, -expected, -expected, expected]
    )
    assert group_advantages([1, 0, 0, 1], eps=0.5)[0] == pytest.approx(
        0.5 / (math.sqrt(1 / 3) + 0.5)
    )


@pytest.mark.parametrize("scale", ["std", "none"])
def test_groups_without_a_comparison_have_none(scale: str) -> None:
    assert group_advantages([0.7], scale=scale).tolist() == [0.0]  # type: ignore[arg-type]
    assert group_advantages([], scale=scale).tolist() == []  # type: ignore[arg-type]
    # A mean of three times 0.1 is not 0.1 in floating point; the difference must not be blown up by
    # a tiny deviation.
    assert group_advantages([0.1, 0.1, 0.1], scale=scale).tolist() == [0.0, 0.0, 0.0]  # type: ignore[arg-type]


def test_dr_grpo_and_rloo_by_hand() -> None:
    """Each reward less the mean of all, 1; less that of the others: 3 - 0, 1 - 1, -1 - 2."""
    assert group_advantages([3.0, 1.0, -1.0], scale="none").tolist() == [2.0, 0.0, -2.0]
    assert group_advantages([3.0, 1.0, -1.0], scale="leave-one-out").tolist() == [3.0, 0.0, -3.0]


def test_reinforce_plus_plus_by_hand() -> None:
    """Rewards 1 (two tokens), 0 (one) in one group and 1 (one token), 0 (two) in another.

    Over six tokens: mean 1/2, variance 6 · .25 / 5 = .3, so ± .5 / √.3.
    """
    found = whitened([[1, 0], [1, 0]], [[2, 1], [1, 2]], has_baseline=False, eps=0.0)
    unit = 0.5 / math.sqrt(0.3)
    assert [group.tolist() for group in found] == [pytest.approx([unit, -unit])] * 2
    # Less the groups' means 1 and 1/2: 0, 0 | 1/2, -1/2. Tokens 1, 3 | 1, 1: mean 0, variance .5/5.
    found = whitened([[1, 1], [1, 0]], [[1, 3], [1, 1]], has_baseline=True, eps=0.0)
    unit = 0.5 / math.sqrt(0.1)
    assert [group.tolist() for group in found] == [[0.0, 0.0], pytest.approx([unit, -unit])]
    # Without the baseline a group whose rewards are all equal teaches too.
    found = whitened([[1, 1], [0, 0]], [[1, 1], [1, 1]], has_baseline=False, eps=0.0)
    assert [group.tolist() for group in found] == [
        pytest.approx([math.sqrt(0.75)] * 2),
        pytest.approx([-math.sqrt(0.75)] * 2),
    ]
    assert [g.tolist() for g in whitened([[2.0], []], [[3], []], has_baseline=False)] == [[0.0], []]
    # A leaf without tokens does not count: the others are all equal.
    found = whitened([[1, 1], [5]], [[2, 2], [0]], has_baseline=False)
    assert [g.tolist() for g in found] == [[0.0, 0.0], [0.0]]
    # Nor where it comes first.
    found = whitened([[5, 1, 1]], [[0, 2, 2]], has_baseline=False)
    assert [g.tolist() for g in found] == [[0.0, 0.0, 0.0]]


def test_refusals() -> None:
    with pytest.raises(ValueError, match="compares a whole batch"):
        assign_credit(branching(), advantage="reinforce++")
    for rewards in ([1.0, math.nan], [math.inf, 0.0], [[1.0], [2.0]]):
        with pytest.raises(ValueError, match="flat list of finite numbers"):
            group_advantages(rewards)  # type: ignore[arg-type]
    unscored = build_tree(Part.of("p", Part("s", reward=None)))
    with pytest.raises(ValueError, match=r"leaves \['0\.0'\] have no reward"):
        assign_credit(unscored)


@given(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0]), min_size=2, max_size=12))
@at_most(60)
def test_advantages_are_centred_and_scaled(rewards: list[float]) -> None:
    advantages = group_advantages(rewards, eps=1e-12)
    assert abs(advantages.sum()) < 1e-9
    if len(set(rewards)) > 1:
        assert np.std(advantages, ddof=1) == pytest.approx(1.0)
        assert np.allclose(advantages, group_advantages(2 * np.array(rewards) + 3, eps=1e-12))


def test_weights_by_hand() -> None:
    assert leaf_weights([1, 4, 2, 1]).tolist() == [0.25] * 4
    # 1 + 1/4 + 1/4 + 1/2 = 2
    assert leaf_weights([1, 4, 4, 2], kind="inverse_branching").tolist() == [
        0.5,
        0.125,
        0.125,
        0.25,
    ]
    assert leaf_weights([]).tolist() == []


def branching() -> Tree:
    """Two starts; 0.0 has two children, the second of which (0.0.1) has three; starts do not count
    as branching."""
    deep = Part.of("s", Part("s"), Part("s", reward=1.0), Part("s"))
    return build_tree(Part.of("p", Part.of("s", Part("s"), deep), Part("s", reward=1.0)))


def test_inverse_branching_of_a_tree_by_hand() -> None:
    """Products 2, 6, 6, 6, 1: shares 1/2, 1/6, 1/6, 1/6, 1, which sum to 2."""
    tree = assign_credit(branching(), leaf_weight="inverse_branching")
    assert [leaf.weight for leaf in tree.leaves] == pytest.approx(
        [1 / 4, 1 / 12, 1 / 12, 1 / 12, 1 / 2]
    )
    assert [leaf.weight for leaf in assign_credit(branching()).leaves] == [0.2] * 5


def test_a_graft_is_no_branch_of_the_policy() -> None:
    """A step with one sampled and one retrieved child was sampled once."""
    tree = build_tree(Part.of("p", Part.of("s", Part("s"), Part("r", reward=1.0)), Part("s")))
    weights = [leaf.weight for leaf in assign_credit(tree, leaf_weight="inverse_branching").leaves]
    assert weights == pytest.approx([1 / 3] * 3)


def test_failed_leaves_leave_the_group() -> None:
    """Rewards 1 and 0 remain: advantages ± 1/2 / (sqrt(1/2) + eps), weights 1/2."""
    part = Part.of(
        "p",
        Part("s", reward=1.0),
        Part("s", status=Status.FAILED),
        Part("s", reward=0.0, status=Status.TRUNCATED),
    )
    for leaf_weight in ("uniform", "inverse_branching"):
        first, failed, last = assign_credit(build_tree(part), leaf_weight=leaf_weight).leaves  # type: ignore[arg-type]
        expected = 0.5 / (math.sqrt(0.5) + 1e-6)
        assert (first.advantage, last.advantage) == (
            pytest.approx(expected),
            pytest.approx(-expected),
        )
        assert (first.weight, failed.weight, last.weight) == (0.5, 0.0, 0.5)
        assert (failed.advantage, failed.has_loss) == (None, False)
        assert first.has_loss and last.has_loss


def test_truncated_leaves_count_whether_or_not_they_are_learned_from() -> None:
    part = Part.of("p", Part("s", reward=1.0), Part("s", reward=-1.0, status=Status.TRUNCATED))
    first, last = assign_credit(
        build_tree(part), advantage="dr_grpo", learn_from_truncated=False
    ).leaves
    assert (first.advantage, last.advantage) == (1.0, -1.0)
    assert (first.weight, last.weight) == (0.5, 0.5)
    assert (first.has_loss, last.has_loss) == (True, False)


def without_credit(leaf: Leaf) -> Leaf:
    fields = {
        "advantage": None,
        "outcome_advantage": None,
        "retrieval_reward": 0.0,
        "retrieved_frac": 0.0,
    }
    return replace(leaf, weight=0.0, has_loss=True, **fields)


@given(random_trees(), st.sampled_from(["uniform", "inverse_branching"]))
@at_most(60)
def test_law_3_weights_sum_to_one(tree: Tree, kind: str) -> None:
    credited = assign_credit(tree, leaf_weight=kind)  # type: ignore[arg-type]
    live = [leaf for leaf in credited.leaves if leaf.status is not Status.FAILED]
    assert sum(leaf.weight for leaf in credited.leaves) == pytest.approx(1.0 if live else 0.0)
    assert all(leaf.weight > 0 for leaf in live)
    if kind == "uniform":
        assert len({leaf.weight for leaf in live}) <= 1
    # Crediting again changes nothing.
    assert assign_credit(credited, leaf_weight=kind) == credited  # type: ignore[arg-type]
    assert [without_credit(leaf) for leaf in credited.leaves] == [
        without_credit(leaf) for leaf in tree.leaves
    ]


# ---------------------------------------------------------------------- grafts and shared steps


def grafted() -> Tree:
    """Two starts; after the first one's search a graft with two answers below it, beside an answer
    of its own.

    Entropies: the search 1 (of 0.5 and 1.5), the answers after the graft 1/2 and 1, so ΔH is 1/2
    and 0.
    """
    graft = Part.of(
        "rr", Part("s", reward=1.0, entropies=[0.5]), Part("ss", reward=0.0, entropies=[0.75, 1.25])
    )
    search = Part.of("sst", graft, Part("sss", reward=0.0), entropies=[0.5, 1.5])
    return build_tree(Part.of("pppp", search, Part("s", reward=1.0)))


def test_credit_of_grafts_by_hand() -> None:
    """Z = tanh(1), 0, 0, 0: mean tanh(1)/4, sample deviation tanh(1)/2, so z = 3/2 and -1/2 three
    times.

    Rewards 1, 0, 0, 1: A = ± 1/2 / sqrt(1/3) = ± sqrt(3)/2. F = 2/6, 2/7, 0, 0.
    """
    leaves = assign_credit(grafted(), eps=1e-12).leaves
    unit = math.sqrt(3) / 2
    assert [leaf.outcome_advantage for leaf in leaves] == pytest.approx([unit, -unit, -unit, unit])
    assert [leaf.retrieval_reward for leaf in leaves] == pytest.approx(
        [math.tanh(1.0), 0.0, 0.0, 0.0]
    )
    assert [leaf.retrieved_frac for leaf in leaves] == pytest.approx([1 / 3, 2 / 7, 0.0, 0.0])
    assert [leaf.advantage for leaf in leaves] == pytest.approx(
        [1.3 * unit, -0.9 * unit, -0.9 * unit, 0.9 * unit]
    )
    half = assign_credit(grafted(), eps=1e-12, retrieval_weight=0.4).leaves
    assert half[0].advantage == pytest.approx(1.6 * unit)
    off = assign_credit(grafted(), eps=1e-12, retrieval_reward="none").leaves
    assert [leaf.advantage for leaf in off] == [leaf.outcome_advantage for leaf in off]
    assert [leaf.retrieval_reward for leaf in off] == [0.0] * 4
    assert [leaf.retrieved_frac for leaf in off] == [leaf.retrieved_frac for leaf in leaves]


def test_failed_leaves_have_no_part_in_the_retrieval_reward() -> None:
    """A failed rollout with a graft: out of mean and deviation of Z; the two others without grafts
    keep their advantages."""
    failed = Part.of("s", Part.of("r", Part("s", status=Status.FAILED)))
    tree = assign_credit(
        build_tree(Part.of("p", failed, Part("s", reward=1.0), Part("s", reward=0.0))),
        advantage="dr_grpo",
    )
    assert [leaf.advantage for leaf in tree.leaves] == [None, 0.5, -0.5]
    first = tree.leaves[0]
    assert (first.outcome_advantage, first.retrieval_reward, first.retrieved_frac) == (
        None,
        0.0,
        0.0,
    )


def test_hard_attribution_by_hand() -> None:
    """Rewards 1, 0, 0, 1 less their mean: 1/2, -1/2, -1/2, 1/2; a step carries the mean over the
    leaves below it."""
    tree = assign_credit(
        grafted(), advantage="dr_grpo", retrieval_reward="none", attribution="hard"
    )
    carried = {step.id: step.advantage for step in tree.steps}
    assert carried == {
        "0": None,
        "0.0": pytest.approx(-1 / 6),  # 1/2, -1/2, -1/2
        "0.0.0": None,  # the graft: the policy wrote nothing there
        "0.0.0.0": 0.5,
        "0.0.0.1": -0.5,
        "0.0.1": -0.5,
        "0.1": 0.5,
    }
    assert [leaf.advantage for leaf in tree.leaves] == [0.5, -0.5, -0.5, 0.5]
    soft = assign_credit(tree, advantage="dr_grpo", retrieval_reward="none")
    assert all(step.advantage is None for step in soft.steps)


@given(mixed_trees())
@at_most(60)
def test_hard_attribution_is_the_mean_below(tree: Tree) -> None:
    credited = assign_credit(tree, attribution="hard")
    for step in credited.steps:
        below = [leaf for leaf in credited.leaves if f"{leaf.step_id}.".startswith(f"{step.id}.")]
        values = [leaf.advantage for leaf in below if leaf.advantage is not None]
        if values and any(step.sampled_mask):
            assert step.advantage == pytest.approx(sum(values) / len(values), abs=1e-12)
        else:
            assert step.advantage is None
    assert assign_credit(credited, attribution="hard") == credited
