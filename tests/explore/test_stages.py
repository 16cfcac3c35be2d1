"""Leaves in two stages: the first are scored, and the others follow where these disagree."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rollout.test_growth import grow, make
from tests.support.error_codes import raises_code
from tests.support.trees import Part, build_tree

from treegraft.core.interfaces import Explorer
from treegraft.core.types import Start, Tree
from treegraft.explore.build import build_explorer
from treegraft.explore.compose import Composed
from treegraft.explore.graft import HybridRollout
from treegraft.explore.independent import Independent
from treegraft.settings.explore import ExploreSettings, GraftSettings
from treegraft.settings.load import load_config


def scored_tree(rewards: Sequence[float]) -> Tree:
    return build_tree(Part.of("p", *(Part("s", reward=one) for one in rewards)))


class Rewards:
    """Gives the leaf of first-level ordinal n the n-th reward, and keeps what it has scored."""

    def __init__(self, rewards: Sequence[float]) -> None:
        self.rewards = rewards
        self.sizes = list[int]()

    async def __call__(self, tree: Tree) -> Tree:
        await asyncio.sleep(0)
        self.sizes.append(len(tree.leaves))
        firsts = [int(leaf.step_id.split(".")[1]) for leaf in tree.leaves]
        known = zip(firsts, tree.leaves, strict=True)
        leaves = (replace(leaf, reward=self.rewards[n]) for n, leaf in known)
        return replace(tree, leaves=tuple(leaves))


def grown(rewards: Sequence[float], explorer: Explorer) -> tuple[Tree, Rewards]:
    scorer = Rewards(rewards)
    grower = make(explorer, num_leaves=len(rewards))
    grower.scorer = scorer
    return grow(grower), scorer


@pytest.mark.parametrize(
    ("rewards", "fill_from", "num_leaves"),
    [
        ((0, 0, 1, 1, 1), None, 2),
        ((1, 1, 0, 0, 0), None, 2),
        ((0, 1, 0, 0, 0), None, 5),
        ((0, 1, 0, 0, 0), 0.5, 5),
        ((0, 1, 0, 0, 0), 0.51, 2),
    ],
)
def test_the_second_stage_follows_where_the_first_leaves_disagree_and_are_good_enough(
    rewards: Sequence[float], fill_from: float | None, num_leaves: int
) -> None:
    tree, scorer = grown(rewards, Independent().in_stages(2, fill_from))
    assert [leaf.reward for leaf in tree.leaves] == list(rewards[:num_leaves])
    assert scorer.sizes == ([2] if num_leaves == 2 else [2, 5])


def test_the_leaves_are_those_of_one_stage() -> None:
    """One seed: the first leaves are the same steps, and so are all of them once the rest follows;
    also where another explorer is composed in behind."""
    whole, scorer = grown((0, 1, 0, 1), Independent())
    assert scorer.sizes == [4]
    staged, _ = grown((0, 1, 0, 1), Composed([Independent().in_stages(2), Independent()]))
    assert staged == whole
    first, _ = grown((1, 1, 0, 1), Independent().in_stages(2))
    assert first.steps == whole.steps[: len(first.steps)]
    assert len(first.leaves) == 2


def test_stages_are_settings_of_explorers_that_start_all_leaves() -> None:
    def built(**fields: Any) -> Explorer:
        return build_explorer(ExploreSettings(num_leaves=8, **fields), vocab_size=10)

    assert built().starts(8) == Start(8)
    assert built(num_first=3).starts(8) == Start(3)
    graft = built(explorers=["graft"], num_first=3, graft=GraftSettings(num_hybrid=4))
    # Of 8 leaves 4 may retrieve, the same share in each stage.
    assert [n for n in range(8) if graft.is_hybrid(n)] == [1, 3, 5, 7]
    assert graft.starts(8) == Start(3)
    plain = built(explorers=["graft"], graft=GraftSettings(num_hybrid=4))
    assert [n for n in range(8) if plain.is_hybrid(n)] == [4, 5, 6, 7]


@given(num_hybrid=st.integers(0, 16), num_first=st.integers(1, 16))
def test_each_stage_has_its_share_of_hybrid_rollouts(num_hybrid: int, num_first: int) -> None:
    graft = HybridRollout(GraftSettings(num_hybrid=num_hybrid), num_leaves=16, is_spread=True)
    assert sum(graft.is_hybrid(n) for n in range(num_first)) == num_first * num_hybrid // 16


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        (['explore.explorers=["entropy"]', "explore.num_first=4"], "override-idle"),
        (["explore.fill_from=0.5"], "override-idle"),
    ],
)
def test_stages_that_would_do_nothing_are_refused(overrides: list[str], code: str) -> None:
    with raises_code(code):
        load_config("recipes/demo.toml", overrides)
