"""AEPO's advantages by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from tests.trees import Part, build_tree

from treegraft.algo.advantages import assign_credit
from treegraft.algo.aepo import standardised, with_entropy_factors
from treegraft.core.errors import SettingError
from treegraft.core.types import Status, Tree
from treegraft.policy.learn.credit import credit_trees
from treegraft.policy.learn.pack import pack_trees
from treegraft.settings.config import Config
from treegraft.settings.load import load_config


def forked() -> Tree:
    """A step that two answers share, and a start that was cut off."""
    shared = Part(
        "sst",
        (Part("s", reward=1.0, entropies=[1.0]), Part("s", entropies=[5.0])),
        entropies=[2, 4],
    )
    cut = Part("s", reward=0.0, status=Status.TRUNCATED, entropies=[3.0])
    return assign_credit(build_tree(Part("p", (shared, cut))), advantage="dr_grpo")


def factors_of(trees: list[Tree], weight: float) -> dict[str, tuple[float, ...] | None]:
    return {
        step.id: step.credit_factors
        for tree in with_entropy_factors(trees, weight=weight)
        for step in tree.steps
    }


def test_the_statistic_counts_a_token_once_for_each_trajectory() -> None:
    # 2 and 4 twice each, 1, 5 and 3: mean 3, variance (4 · 1 + 2 · 4 + 0) / 7.
    spread = math.sqrt(12 / 7)
    found = factors_of([forked()], 0.2)
    assert found["0"] is None and found["0.1"] is None
    assert found["0.0"] == (pytest.approx(1 - 0.2 / spread), pytest.approx(1 + 0.2 / spread), 1.0)
    assert found["0.0.0"] == (pytest.approx(1 - 0.4 / spread),)
    assert found["0.0.1"] == (pytest.approx(1 + 0.4 / spread),)


def test_trajectories_without_loss_and_tokens_without_loss_do_not_count() -> None:
    tree = forked()
    leaves = tuple(replace(leaf, has_loss=leaf.step_id != "0.1") for leaf in tree.leaves)
    # Without the 3: still mean 3, variance 12 / 6.
    found = factors_of([replace(tree, leaves=leaves)], 0.2)
    assert found["0.0.1"] == (pytest.approx(1 + 0.4 / math.sqrt(2)),)
    # The token of the start that does not learn has the factor of the mean.
    assert found["0.1"] is None


def test_one_statistic_for_the_whole_batch() -> None:
    """A tree's factors depend on the others, never on their order."""
    low = assign_credit(build_tree(Part("p", (Part("s", entropies=[0.1]),) * 2)))
    alone, both = factors_of([forked()], 0.2), factors_of([forked(), low], 0.2)
    assert alone["0.0"] != both["0.0"]
    turned = with_entropy_factors([low, forked()], weight=0.2)
    assert {s.id: s.credit_factors for s in turned[1].steps} == {
        s.id: s.credit_factors for s in with_entropy_factors([forked(), low], weight=0.2)[0].steps
    }


def test_no_factor_is_negative() -> None:
    # z = ±1: 1 - 3 would turn the advantage around.
    tree = assign_credit(build_tree(Part("p", (Part("ss", entropies=[1.0, 3.0]),))))
    assert factors_of([tree], 3.0)["0.0"] == (0.0, 4.0)


def test_equal_entropies_have_factor_one() -> None:
    values = np.full(3, 0.1)
    assert standardised(values, np.ones(3)).tolist() == [0.0] * 3
    assert standardised(values, np.zeros(3)).tolist() == [0.0] * 3
    tree = assign_credit(build_tree(Part("p", (Part("sss", entropies=[0.1] * 3),))))
    assert with_entropy_factors([tree], weight=0.2) == [tree]


def test_the_setting_multiplies_what_each_contribution_carries() -> None:
    tree = build_tree(
        Part("p", (Part("ss", reward=1.0, entropies=[1.0, 3.0]), Part("s", entropies=[2.0])))
    )
    config = load_config({"credit": {"advantage": "dr_grpo", "token_entropy_weight": 0.3}})
    [credited] = credit_trees([tree], config)
    # z = -1 / sqrt(2/3), the same above, and 0.
    z = math.sqrt(1.5)
    assert pack_trees([credited]).advantages.tolist() == [
        pytest.approx(0.5 * (1 - 0.3 * z)),
        pytest.approx(0.5 * (1 + 0.3 * z)),
        pytest.approx(-0.5),
    ]


def test_a_rule_of_the_user_may_write_factors() -> None:
    config = Config.model_validate({"credit": {"rule": "mine:rule"}})

    def rule(tree: Tree, last: float = 2.0) -> Tree:
        column = (1.0,) * (len(tree.steps[1].token_ids) - 2) + (last, 1.0)
        steps = (tree.steps[0], replace(tree.steps[1], credit_factors=column), *tree.steps[2:])
        return replace(tree, steps=steps)

    tree = build_tree(Part("p", (Part("sst", (Part("s", reward=1.0), Part("s"))),)))
    [found] = credit_trees([tree], config, rule)
    # Shared: both tokens twice, the second with twice the advantage.
    whole = abs(found.leaves[0].advantage or 0.0)
    assert [abs(one) / whole for one in pack_trees([found]).advantages.tolist()] == [
        pytest.approx(one) for one in (1, 2, 1, 1, 2, 1)
    ]
    with pytest.raises(SettingError, match=r"step '0.0' has credit_factors .*nan.*finite"):
        credit_trees([tree], config, lambda given: rule(given, math.nan))
