"""Packing by hand and at random: positions, nodes, sources, contributions, plans."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.examples import at_most
from tests.support.trees import Part, build_tree, mixed_trees, random_trees, text_of

from treegraft.algo.advantages import assign_credit
from treegraft.core.types import Status, Tree
from treegraft.policy.learn.dense import tree_mask
from treegraft.policy.learn.pack import (
    Node,
    imitated_steps,
    num_imitated_tokens,
    num_tree_tokens,
    pack_trees,
    plan_packs,
    split_tree,
)

QUICK = at_most(60)


def test_the_example_of_the_page() -> None:
    """0: p p   0.0: s s t   0.0.0: s   0.1: s, worked out in the docstring of pack.py."""
    tree = build_tree(Part.of("pp", Part.of("sst", Part("s")), Part("s")), tokens=range(11, 18))
    batch = pack_trees([tree])
    assert batch.token_ids.tolist() == [11, 12, 13, 14, 15, 16, 17]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 2]
    assert batch.sampled.tolist() == [2, 3, 5, 6]
    # The first token of both children of the root is predicted by the prompt's last token, at 1.
    assert batch.sources.tolist() == [1, 2, 4, 1]
    assert batch.tokens.tolist() == [0, 1, 2, 3]
    assert batch.trajectories.tolist() == [0, 0, 0, 1]
    # 0.0 and 0.0.0 are one chain: one node.
    assert batch.trees[0].nodes == (Node(0, 2, 7), Node(2, 6, 6), Node(6, 7, 7))
    ends = [7, 7, 6, 6, 6, 6, 7]
    mask = tree_mask(batch.trees[0], batch.position_ids, None)
    assert mask.tolist() == [[j <= i < ends[j] for j in range(7)] for i in range(7)]
    assert batch.num_tokens == 7
    assert batch.num_path_tokens == 6 + 3


def test_a_shared_token_contributes_once_for_each_trajectory() -> None:
    tree = build_tree(
        Part.of("p", Part.of("sS", Part("s"), Part("s", temperature=0.5), temperature=0.0))
    )
    batch = pack_trees([tree])
    assert batch.sampled.tolist() == [1, 2, 3, 4]
    assert batch.sources.tolist() == [0, 1, 2, 2]
    assert batch.tokens.tolist() == [0, 1, 2, 0, 1, 3]
    assert batch.trajectories.tolist() == [0, 0, 0, 1, 1, 1]
    assert batch.carries_loss.tolist() == [True, False, True, True, False, True]
    assert batch.temperatures.tolist() == [
        1.0,
        1.0,
        1.0,
        0.5,
    ]  # at temperature 0 scores are those of 1
    values = batch.per_trajectory(torch.tensor([10.0, 20.0, 30.0, 40.0]))
    assert [part.tolist() for part in values] == [[10.0, 20.0, 30.0], [10.0, 20.0, 40.0]]


def test_the_gap_to_the_engine_is_a_distance_of_the_version_that_sampled() -> None:
    tree = build_tree(Part.of("p", Part.of("s", Part("s"), Part("s"))))
    later = (*tree.steps[:-1], replace(tree.steps[-1], policy_version=5))
    batch = pack_trees([replace(tree, steps=later)])
    moved = batch.sampling_logprobs + torch.tensor([0.25, -0.5, 0.75])
    for version, gaps in ((None, [0.25, 0.5, 0.75]), (5, [0.75])):
        assert batch.engine_gaps(moved, version).tolist() == pytest.approx(gaps, abs=1e-6)


def test_a_window_counts_positions_and_not_places_in_the_pack() -> None:
    """Second branch: place 4 stands at position 2, two tokens after the prompt's first."""
    batch = pack_trees([build_tree(Part.of("pp", Part("ss"), Part("s")))])
    mask = tree_mask(batch.trees[0], batch.position_ids, 2)
    assert mask[4].tolist() == [False, True, False, False, True]
    assert mask[3].tolist() == [False, False, True, True, False]


def test_an_empty_step_stands_for_nothing() -> None:
    tree = build_tree(
        Part.of(
            "pp",
            Part("s"),
            Part("", status=Status.FAILED),
            Part.of("s", Part("", status=Status.FAILED)),
        )
    )
    batch = pack_trees([tree])
    assert batch.num_tokens == 4
    assert batch.sources.tolist() == [1, 1]
    assert [len(part) for part in batch.per_trajectory(torch.zeros(2))] == [1, 0, 1]
    # A leaf without loss of its own; the token it shares with nobody carries none either.
    assert batch.carries_loss.tolist() == [True, False]


def test_an_empty_parent_is_looked_through() -> None:
    """A sampled token whose parent is empty is predicted by its grandparent's last token."""
    batch = pack_trees([build_tree(Part.of("ppp", Part.of("", Part("s")), Part("s")))])
    assert batch.sources.tolist() == [2, 2]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 3]


@given(st.lists(random_trees(), min_size=1, max_size=3))
@QUICK
def test_every_path_can_be_read_back(trees: list[Tree]) -> None:
    """From the mask alone: what the last token of a path sees is that path, in order, at positions
    0, 1, 2 ..."""
    batch = pack_trees(trees)
    assert batch.num_tokens == sum(len(step.token_ids) for tree in trees for step in tree.steps)
    paths = iter(batch.paths)
    for index, tree in enumerate(trees):
        packed = batch.trees[index]
        positions = batch.position_ids[packed.start : packed.end]
        ids = batch.token_ids[packed.start : packed.end]
        mask = tree_mask(packed, positions, None)
        for leaf in tree.leaves:
            path = next(paths)
            assert path.leaf == leaf
            full = [step for step in path.steps if step.num_tokens][-1]
            # Packed in the tree's order, so that its last token lies behind all steps before it.
            last = sum(step.num_tokens for step in tree.steps[: tree.steps.index(full) + 1]) - 1
            seen = mask[last].nonzero()[:, 0]
            assert ids[seen].tolist() == path.token_ids
            assert positions[seen].tolist() == list(range(len(path.token_ids)))
    assert next(paths, None) is None


@given(st.lists(random_trees(), min_size=1, max_size=3))
@QUICK
def test_contributions_follow_paths(trees: list[Tree]) -> None:
    """Each sampled token of each trajectory, with the token before it on the path as its source."""
    batch = pack_trees(trees)
    ids = batch.token_ids.tolist()
    sampled = batch.sampled.tolist()
    sources = batch.sources.tolist()
    position = batch.position_ids.tolist()
    rows = iter(
        zip(
            batch.tokens.tolist(),
            batch.trajectories.tolist(),
            batch.carries_loss.tolist(),
            strict=True,
        )
    )
    for number, path in enumerate(batch.paths):
        for place, (is_sampled, has_loss) in enumerate(
            zip(path.sampled_mask, path.loss_mask, strict=True)
        ):
            if not is_sampled:
                continue
            token, owner, carries = next(rows)
            assert (owner, carries) == (number, has_loss)
            assert (
                ids[sampled[token]] == path.token_ids[place] and position[sampled[token]] == place
            )
            assert (
                ids[sources[token]] == path.token_ids[place - 1]
                and position[sources[token]] == place - 1
            )
    assert next(rows, None) is None
    logprobs = batch.per_trajectory(batch.sampling_logprobs)
    for values, path in zip(logprobs, batch.paths, strict=True):
        expected = [
            value for value, one in zip(path.logprobs, path.sampled_mask, strict=True) if one
        ]
        torch.testing.assert_close(values, torch.tensor(expected))


def taught(*rewards: float) -> Tree:
    """0: p p   0.0: s s t   0.0.0: r r r (two imitated tokens)   0.0.0.0: s   0.0.0.1: s   0.0.1: s
    0.1: s"""
    graft = Part.of("rrr", Part("s", reward=rewards[0]), Part("s", reward=rewards[1]), lesson=2)
    search = Part.of("sst", graft, Part("s", reward=rewards[2]))
    return assign_credit(
        build_tree(Part.of("pp", search, Part("s", reward=rewards[3])), tokens=range(11, 23))
    )


def test_an_imitated_text_stands_beside_its_graft() -> None:
    """Packed: pp sst LL rrr s s s s; the imitated text sees the path above the graft and nothing
    sees it."""
    tree = taught(1.0, 0.0, 0.0, 0.0)
    batch = pack_trees([tree], takes_imitated=True)
    imitated = batch.imitated
    assert imitated is not None
    assert batch.token_ids.tolist() == [
        11,
        12,
        13,
        14,
        15,
        *tree.steps[2].lesson_ids,
        *range(16, 23),
    ]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 5, 6, 7, 8, 8, 5, 2]
    assert batch.trees[0].nodes == (
        Node(0, 2, 14),
        Node(2, 5, 13),
        Node(5, 7, 7),
        Node(7, 10, 12),
        Node(10, 11, 11),
        Node(11, 12, 12),
        Node(12, 13, 13),
        Node(13, 14, 14),
    )
    assert imitated.packed.tolist() == [5, 6]
    assert imitated.sources.tolist() == [
        4,
        5,
    ]  # the search's result predicts its first token, as it does the graft's siblings
    # Leaf 0 did better than its group; leaf 1 below the same graft did not.
    assert (imitated.tokens.tolist(), imitated.trajectories.tolist()) == ([0, 1], [0, 0])
    assert batch.sampled.tolist() == [2, 3, 10, 11, 12, 13]
    assert num_imitated_tokens(tree) == 2


def test_what_two_trajectories_learned_is_contributed_twice() -> None:
    batch = pack_trees([taught(1.0, 1.0, 0.0, 0.0)], takes_imitated=True)
    assert batch.imitated is not None
    assert batch.imitated.tokens.tolist() == [0, 1, 0, 1]
    assert batch.imitated.trajectories.tolist() == [0, 0, 1, 1]


def test_grafts_that_did_not_pay_are_not_packed() -> None:
    for rewards in ((0.0, 0.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.0)):
        tree = taught(*rewards)
        batch = pack_trees([tree], takes_imitated=True)
        assert batch.imitated is None and num_imitated_tokens(tree) == 0
        assert batch.token_ids.tolist() == list(range(11, 23))
    assert pack_trees([taught(1.0, 0.0, 0.0, 0.0)]).imitated is None


@given(st.lists(mixed_trees(), min_size=1, max_size=3))
@at_most(25)
def test_imitated_texts_see_their_path_and_are_seen_by_nobody(trees: list[Tree]) -> None:
    credited = [assign_credit(tree) for tree in trees]
    batch = pack_trees(credited, takes_imitated=True)
    plain = pack_trees(credited)
    assert batch.num_tokens == plain.num_tokens + sum(
        num_imitated_tokens(tree) for tree in credited
    )
    if batch.imitated is None:
        return
    imitated_tokens = set(batch.imitated.packed.tolist())
    place = {}
    for packed in batch.trees:
        part = slice(packed.start, packed.end)
        mask = tree_mask(packed, batch.position_ids[part], None)
        for row in range(packed.end - packed.start):
            seen = [packed.start + column for column in mask[row].nonzero()[:, 0].tolist()]
            place[packed.start + row] = seen
            if packed.start + row not in imitated_tokens:
                assert not imitated_tokens & set(seen)
    at = -1
    for tree in credited:
        for step in sorted(imitated_steps(tree).values(), key=lambda one: one.ordinals):
            at += step.num_tokens
            seen = place[batch.imitated.packed.tolist()[at]]
            path = text_of(tree, step)
            assert batch.token_ids[seen].tolist() == path
            assert batch.position_ids[seen].tolist() == list(range(len(path)))
    # Without them the batch is the plain one.
    rest = [index for index in range(batch.num_tokens) if index not in imitated_tokens]
    assert torch.equal(batch.token_ids[rest], plain.token_ids) and torch.equal(
        batch.position_ids[rest], plain.position_ids
    )
    assert torch.equal(batch.token_ids[batch.sampled], plain.token_ids[plain.sampled])
    assert torch.equal(batch.token_ids[batch.sources], plain.token_ids[plain.sources])
    for name in ("tokens", "trajectories", "carries_loss", "advantages"):
        assert torch.equal(getattr(batch, name), getattr(plain, name))


def test_contributions_carry_the_step_s_advantage_where_there_is_one() -> None:
    """Rewards 1, 0, 0 less their mean; the shared step has the mean of the first two under hard
    attribution."""
    tree = build_tree(
        Part.of(
            "p", Part.of("s", Part("s", reward=1.0), Part("s", reward=0.0)), Part("s", reward=0.0)
        )
    )
    third = 1 / 3
    soft = pack_trees([assign_credit(tree, advantage="dr_grpo")])
    torch.testing.assert_close(soft.advantages, torch.tensor([2, 2, -1, -1, -1]) * third)
    hard = pack_trees([assign_credit(tree, advantage="dr_grpo", attribution="hard")])
    torch.testing.assert_close(hard.advantages, torch.tensor([0.5, 2, 0.5, -1, -1]) * third)
    assert pack_trees([tree]).advantages.tolist() == [0.0] * 5


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 60))
@QUICK
def test_plans_hold_everything_once_and_fit(sizes: list[int], room: int) -> None:
    plan = plan_packs(sizes, room)
    assert sorted(index for pack in plan for index in pack) == list(range(len(sizes)))
    assert all(len(pack) == 1 or sum(sizes[index] for index in pack) <= room for pack in plan)
    assert all(pack == sorted(pack) for pack in plan) and plan == sorted(plan)
    # First fit: no two packs could have been one, unless one is too large alone.
    for first in range(len(plan)):
        for second in range(first + 1, len(plan)):
            assert sum(sizes[index] for index in plan[first] + plan[second]) > room


def test_a_plan_by_hand() -> None:
    """Largest first: 7 | 5, then 4 beside 5 (9 of 10), 3 beside 7, and 1 beside 5 and 4."""
    assert plan_packs([4, 7, 1, 5, 3], 10) == [[0, 2, 3], [1, 4]]
    assert plan_packs([20, 3], 10) == [[0], [1]]
    assert plan_packs([], 10) == []


@given(random_trees(), st.integers(1, 40))
@QUICK
def test_a_tree_is_split_into_parts_that_fit(tree: Tree, room: int) -> None:
    """Every leaf is in one part, in order; a part fits or is a single path; no part could have
    taken the next one's first leaf."""
    parts = split_tree(tree, room)
    assert [leaf for part in parts for leaf in part.leaves] == list(tree.leaves)
    sizes = [num_tree_tokens(part) for part in parts]
    assert all(
        size <= room or len(part.leaves) == 1 for size, part in zip(sizes, parts, strict=True)
    )
    for part in parts:
        assert {step.id for step in part.steps} == {
            s.id for path in part.trajectories() for s in path.steps
        } or len(parts) == 1
    for first, second in pairwise(parts):
        ids = {step.id for step in first.steps}
        new = [step for step in second.trajectories()[0].steps if step.id not in ids]
        assert num_tree_tokens(first) + sum(len(step.token_ids) for step in new) > room
