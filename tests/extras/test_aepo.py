"""AEPO by hand: advantages of tokens, budget, penalty."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.explore.test_explore import path, step
from tests.rollout.test_growth import grow, make
from tests.support.error_codes import raises_code
from tests.support.tiny import tiny
from tests.support.trees import Part, build_tree

from treegraft.algo.advantages import assign_credit
from treegraft.core.types import Branch, BranchCause, Origin, Start, Status, Tree
from treegraft.explore.build import build_explorer
from treegraft.extras.methods import aepo_explorer
from treegraft.extras.methods.aepo_explorer import BalancedBranching
from treegraft.extras.methods.aepo_math import (
    coin_probability,
    damping,
    num_global_rollouts,
    standardised,
    with_entropy_factors,
)
from treegraft.policy.learn.credit import credit_trees, find_credit
from treegraft.policy.learn.pack import pack_trees
from treegraft.runs.record import read_trees
from treegraft.settings.config import Config
from treegraft.settings.explore import EntropySettings
from treegraft.settings.load import load_config
from treegraft.train import train


def forked() -> Tree:
    """A step that two answers share, and a start that was cut off."""
    shared = Part(
        "sst",
        (Part("s", reward=1.0, entropies=[1.0]), Part("s", entropies=[5.0])),
        entropies=[2, 4],
    )
    cut = Part("s", reward=0.0, status=Status.TRUNCATED, entropies=[3.0])
    return assign_credit(build_tree(Part("p", (shared, cut))), advantage="dr_grpo")


def factors_of(trees: list[Tree], weight: float) -> dict[str, Any]:
    return {
        step.id: None if step.credit_factors is None else tuple(step.credit_factors.tolist())
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
    alone = factors_of([forked()], 0.2)
    both = factors_of([forked(), low], 0.2)
    assert alone["0.0"] != both["0.0"]
    turned = with_entropy_factors([low, forked()], weight=0.2)
    assert turned[1].steps == with_entropy_factors([forked(), low], weight=0.2)[0].steps


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
    [found] = credit_trees([tree], config, find_credit(config, rule))
    # Shared: both tokens twice, the second with twice the advantage.
    whole = abs(found.leaves[0].advantage or 0.0)
    assert [abs(one) / whole for one in pack_trees([found]).advantages.tolist()] == [
        pytest.approx(one) for one in (1, 2, 1, 1, 2, 1)
    ]
    with raises_code("advantage-not-finite", match=r"step '0.0' has .*nan.*finite"):
        found = find_credit(config, lambda given: rule(given, math.nan))
        credit_trees([tree], config, found)


# ---------------------------------------------------------------------- where a tree grows


def test_the_budget_by_hand() -> None:
    # σ(0) = 1/2 of 16, and one more; σ(-0.5 · 2 ln 3) = 1/4; never more than all.
    assert num_global_rollouts([0.0], 16, weight=0.5) == 9
    assert num_global_rollouts([math.log(3), 3 * math.log(3)], 16, weight=0.5) == 5
    assert num_global_rollouts([-1e9], 16, weight=0.5) == 16
    assert num_global_rollouts([1e9], 16, weight=0.5) == 1
    # No result, no place for a branch.
    assert num_global_rollouts([], 16, weight=0.5) == 16


def test_the_coin_by_hand() -> None:
    # The values of the released rule for 0, 1, 5 and 10 branches in a row, and no entropy change.
    found = [coin_probability(0.0, 0.2, 0.5, damping(n, 0.05)) for n in (0, 1, 5, 10, 20, 40)]
    assert found == [pytest.approx(one) for one in (0.5, 1 - 0.5 / 0.95, 1 / 3, 0, 0, 0)]
    assert coin_probability(1.0, 0.2, 0.5, damping(5, 0.05)) == pytest.approx(1 / 3 + 0.2)
    assert coin_probability(9.0, 0.2, 0.5, 1.0) == 1.0


def balanced(**entropy: object) -> BalancedBranching:
    return BalancedBranching(
        EntropySettings.model_validate({"normaliser": "none", "probe_tokens": 2, **entropy}),
        vocab_size=50,
    )


def asked(explorer: BalancedBranching, changes: list[float]) -> list[Branch]:
    """What the rule says at each step of a path whose steps have these rises."""
    found: list[Branch] = []
    steps = [step("0.0", [1.0, 1.0])]
    for change in changes:
        branch = explorer.after_probe(path(*steps), [1.0 + change, 1.0])
        assert branch is not None
        found.append(branch)
        steps.append(step(f"{steps[-1].id}.0", [1.0 + change, 1.0]))
    return found


def test_branches_in_a_row_become_less_likely(monkeypatch: pytest.MonkeyPatch) -> None:
    """(0.5 + 0.2 ΔH) · (1 - 0.25 l) > 0.5."""
    monkeypatch.setattr(aepo_explorer, "PENALTY", 0.25)
    found = asked(balanced(), [1.0, 1.0, 1.0, 5.0, 5.0, -1.0, 1.0])
    # .7; .7 · .75 = .525; .7 · .5 = .35; then l = 0 again: 1.5, 1.5 · .75, a fall, and l = 0.
    assert [one.cause.probability for one in found] == [
        pytest.approx(one) for one in (0.7, 0.525, 0.35, 1.0, 1.0, 0.3 * 0.5, 0.7)
    ]
    assert [one.num for one in found] == [1, 1, 0, 1, 1, 0, 1]


def test_steps_that_no_rule_was_asked_about_leave_the_count_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(aepo_explorer, "PENALTY", 0.25)
    explorer = balanced()
    first = step("0.0", [1.0, 1.0])
    second = step("0.0.0", [2.0, 1.0])
    own = replace(step("0.0.1", [9.0, 1.0]), cause=branch_cause())
    graft = step("0.0.0.0", [], Origin.RETRIEVED)
    after = step("0.0.0.0.0", [9.0, 1.0])
    for steps, expected in (((first, second), 0.525), ((first, own), 0.7)):
        branch = explorer.after_probe(path(*steps), [2.0, 1.0])
        assert branch is not None and branch.cause.probability == pytest.approx(expected)
    branch = explorer.after_probe(path(first, second, graft, after), [2.0, 1.0])
    assert branch is not None and branch.cause.probability == pytest.approx(0.525)


def branch_cause() -> BranchCause:
    return BranchCause(entropy_change=0.0, probability=0.5, rule="threshold")


def test_the_coin_of_an_earlier_step_is_the_one_that_was_tossed_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(aepo_explorer, "PENALTY", 0.25)
    explorer = balanced(rule="bernoulli")
    for task in range(20):
        steps = [step("0.0", [1.0, 1.0]), step("0.0.0", [1.0, 1.0])]
        key = (0, "train", 1, f"t/{task}")
        then = explorer.after_probe(path(*steps[:1], key=(*key, "0.0.0")), [1.0, 1.0])
        now = explorer.after_probe(path(*steps, key=(*key, "0.0.0.0")), [1.0, 1.0])
        assert then is not None and now is not None
        # P = 1 - 0.5 / (1 - 0.25 l)
        assert then.cause.probability == 0.5
        assert now.cause.probability == pytest.approx(1 / 3 if then.num else 0.5)


def test_the_probe_is_the_first_rollout() -> None:
    explorer = balanced()
    assert explorer.starts(16) == Start(1)
    rise = 2 * math.log(3)
    branches = (
        Part("s", entropies=[1.0 + rise]),
        Part("ss", entropies=[50.0, 50.0]),
    )
    tree = build_tree(Part("p", (Part("sst", branches, entropies=[1.0, 1.0]),)))
    # Two leaves are there; the rise of the first one's answer says 5 of 16 at the prompt.
    assert explorer.fill(tree, 16) == Start(4)
    assert explorer.fill(tree, 3) == Start(1)
    # What is left over becomes rollouts from the prompt: as many at a time as were planned, and
    # half of it at most.
    unsure = Part("st", (Part("s", entropies=[1e6]),), entropies=[1.0])
    assert explorer.fill(build_tree(Part("p", (unsure,))), 16) == Start(1)
    five = Part("sst", branches[:1], entropies=[1.0, 1.0])
    fives = [build_tree(Part("p", (five, *[Part("s")] * num))) for num in (4, 8)]
    assert [explorer.fill(one, 16) for one in fives] == [Start(5), Start(4)]
    assert explorer.fill(fives[0], 6) == Start(1)
    # Without a result there is no place for a branch.
    assert explorer.fill(build_tree(Part("p", (Part("s"),))), 16) == Start(15)
    # A probe that failed before its first token.
    failed = build_tree(Part("p", (Part("", status=Status.FAILED, reward=None),)))
    assert explorer.fill(failed, 4) == Start(3)


def test_fewer_rollouts_from_the_prompt_leave_more_branches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rise of 9 nats after each result; m is 9, 3 and 1 of 16."""
    found = []
    for weight, num in ((0.0, 9), (0.2, 3), (5.0, 1)):
        monkeypatch.setattr(aepo_explorer, "BUDGET_WEIGHT", weight)
        explorer = BalancedBranching(
            EntropySettings(probe_tokens=2, normaliser="none", base_prob=0.0, threshold=0.5),
            vocab_size=10,
        )
        tree = grow(
            make(explorer, entropy=lambda path: 5.0 if "<result>" in path else 0.5, num_leaves=16)
        )
        assert num_global_rollouts(explorer._changes(tree), 16, weight=weight) == num
        assert len(tree.leaves) == 16
        found.append(sum(isinstance(one.cause, BranchCause) for one in tree.steps))
    assert found == [7, 8, 8]


def test_a_short_first_stage_has_its_share_of_grafts() -> None:
    config = load_config(
        tiny(explore={"explorers": ["balanced", "graft"], "num_leaves": 16}, buffer={"path": "b"})
    )
    explorer = build_explorer(config.explore, vocab_size=50)
    assert [n for n in range(9) if explorer.is_hybrid(n)] == [1, 3, 5, 7]
    plain = load_config(
        tiny(explore={"explorers": ["entropy", "graft"], "num_leaves": 16}, buffer={"path": "b"})
    )
    explorer = build_explorer(plain.explore, vocab_size=50)
    assert [n for n in range(8) if explorer.is_hybrid(n)] == [4, 5, 6, 7]


def test_a_run_with_a_balanced_budget(tmp_path: Path) -> None:
    settings = tiny(
        run={"name": "a", "dir": str(tmp_path), "num_updates": 1},
        explore={"explorers": ["balanced"], "num_leaves": 6},
        credit={"token_entropy_weight": 0.2},
        loss={"objective": "gppo", "kept_low": 0.0, "aggregation": "token-mean"},
        eval={"every": 0, "at_start": False, "at_end": False},
    )
    done = train(settings, display=False)
    trees = read_trees(done.run_dir / "trees" / "update-000001.jsonl")
    assert all(len(tree.leaves) == 6 for tree in trees)
    decided = [one.decision for tree in trees for one in tree.steps if one.decision]
    assert decided and "branch/unused_frac" not in done.metrics
    # The columns are those of a new computation on the recorded trees.
    assert with_entropy_factors(trees, weight=0.2) == trees
    assert any(one.credit_factors is not None for tree in trees for one in tree.steps)


def test_what_does_not_fit_a_balanced_budget() -> None:
    own = {"explore": {"explorers": ["balanced"]}}
    for override in ("explore.entropy.num_starts=4", "explore.entropy.statistic=lagging"):
        with raises_code("override-idle"):
            load_config(tiny(**own), [override])
    with raises_code("settings-contradict", "explore.explorers"):
        load_config(tiny(), ['explore.explorers=["balanced", "entropy"]'])
    assert load_config(tiny(**own)).explore.entropy.normaliser == "log_vocabulary"
