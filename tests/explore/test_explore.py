"""What explorers decide, and who gets branches where the budget is short: rules by hand, no
engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.error_codes import raises_code

from treegraft.core.types import Branch, BranchCause, Generate, Graft, Origin, PathView, Start, Step
from treegraft.explore.budget import Budget, Rounds
from treegraft.explore.build import build_explorer
from treegraft.explore.compose import Composed
from treegraft.explore.entropy import EntropyBranching
from treegraft.explore.graft import HybridRollout
from treegraft.explore.independent import Independent
from treegraft.settings.explore import EntropySettings, ExploreSettings, GraftSettings

KEY = (0, "train", 1, "t/0", "0.0.0")


def step(
    step_id: str, entropies: Sequence[float], origin: Origin = Origin.POLICY, results: int = 2
) -> Step:
    """A step with these entropies and some tokens of a result behind them."""
    count = len(entropies)
    return Step(
        id=step_id,
        parent=step_id.rpartition(".")[0] or None,
        depth=step_id.count("."),
        token_ids=(1,) * (count + results),
        origins=(origin,) * count + (Origin.TOOL,) * results,
        loss_mask=(False,) * (count + results),
        sampling_logprobs=(0.0,) * (count + results),
        entropies=(*entropies, *(0.0,) * results),
    )


def path(*steps: Step, key: tuple[int | str, ...] = KEY) -> PathView:
    return PathView((step("0", [0.0], Origin.PROMPT, 0), *steps), key)


def branch(num: int = 1, change: float = 0.0) -> Branch:
    return Branch(num, BranchCause(entropy_change=change, probability=0.5, rule="threshold"))


def wanted(found: Branch | None) -> int:
    """How many branches a rule asks for; it says what it saw also where it wants none."""
    assert found is not None
    return found.num


# ---------------------------------------------------------------------- ARPO's rule


def test_threshold_branches_where_entropy_rose() -> None:
    """Baseline 1.0 and 0.5 nats, then 1.5 and 0.6: the change is 0.6, over a normaliser of 2 it is
    0.3, P = 0.5 + 0.2 · 0.3."""
    explorer = EntropyBranching(EntropySettings(num_branches=3, probe_tokens=2), vocab_size=2)
    found = explorer.after_probe(path(step("0.0", [1.0, 0.5, 9.0])), [1.5, 0.6])
    assert found is not None and found.num == 3
    assert found.cause.entropy_change == pytest.approx(0.3)
    assert found.cause.probability == pytest.approx(0.56)
    assert found.cause.rule == "threshold"
    assert (
        wanted(explorer.after_probe(path(step("0.0", [1.0, 0.5])), [1.0, 0.5])) == 0
    )  # P = τ does not exceed it
    assert wanted(explorer.after_probe(path(step("0.0", [1.0, 0.5])), [0.9, 0.5])) == 0


def test_the_normaliser_cannot_matter_where_base_and_threshold_agree() -> None:
    for normaliser in (1.0, 11.9, 151_665.0):
        explorer = EntropyBranching(EntropySettings(probe_tokens=1), vocab_size=normaliser)
        assert wanted(explorer.after_probe(path(step("0.0", [1.0])), [1.01])) > 0
        assert wanted(explorer.after_probe(path(step("0.0", [1.0])), [0.99])) == 0


def test_the_baseline_is_the_roots_first_step_for_branches_too() -> None:
    """Deep on a branch, the step before the probe (2.0 nats) does not matter; the start's (0.1)
    does."""
    explorer = EntropyBranching(EntropySettings(probe_tokens=1, normaliser="none"), vocab_size=100)
    view = path(step("0.2", [0.1]), step("0.2.1", [2.0]))
    assert wanted(explorer.after_probe(view, [0.2])) > 0
    assert view.start == 2


def test_bernoulli_tosses_a_keyed_coin_with_that_probability() -> None:
    explorer = EntropyBranching(
        EntropySettings(probe_tokens=1, rule="bernoulli", normaliser="none"), vocab_size=100
    )
    first = path(step("0.0", [0.0]))
    hits = [
        wanted(explorer.after_probe(PathView(first.steps, (0, "train", n)), [1.0])) > 0
        for n in range(4000)
    ]
    assert 0.7 - 0.03 < sum(hits) / 4000 < 0.7 + 0.03  # 0.5 + 0.2 · 1
    assert hits == [
        wanted(explorer.after_probe(PathView(first.steps, (0, "train", n)), [1.0])) > 0
        for n in range(4000)
    ]
    assert all(
        wanted(explorer.after_probe(PathView(first.steps, (n,)), [9.0])) for n in range(200)
    )  # clipped to 1
    assert not any(
        wanted(explorer.after_probe(PathView(first.steps, (n,)), [-9.0])) for n in range(200)
    )  # clipped to 0


def test_the_lagging_statistic_looks_at_the_step_that_called() -> None:
    """The released code: no change after the first result by construction, and one result late
    afterwards."""
    explorer = EntropyBranching(
        EntropySettings(probe_tokens=1, statistic="lagging", normaliser="none"), vocab_size=100
    )
    assert explorer.probe_tokens == 0
    assert wanted(explorer.after_probe(path(step("0.0", [1.0])), ())) == 0
    assert wanted(explorer.after_probe(path(step("0.0", [1.0]), step("0.0.0", [1.5])), ())) > 0


# ---------------------------------------------------------------------- RAPO's rule


def test_the_first_starts_never_retrieve_and_a_coin_decides_for_the_others() -> None:
    explorer = HybridRollout(GraftSettings(num_hybrid=8), num_leaves=16)
    assert [explorer.is_hybrid(n) for n in range(16)] == [False] * 8 + [True] * 8
    asked = [
        explorer.before_step(path(step(f"0.{n}", [0.0]), key=(n, k)))
        for n in range(8)
        for k in range(20)
    ]
    assert asked == [Generate()] * 160
    asked = [
        explorer.before_step(path(step(f"0.{n}", [0.0]), key=(n, k)))
        for n in range(8, 16)
        for k in range(500)
    ]
    assert 0.46 < asked.count(Graft()) / 4000 < 0.54


def test_shares_of_hybrids_keep_with_fewer_starts_and_with_back_fill() -> None:
    """Of 16 leaves 4 hybrid, 8 starts: the last 2 of 8; the same of those that fill up."""
    explorer = HybridRollout(GraftSettings(num_hybrid=4), num_leaves=16, num_starts=8)
    assert [n for n in range(16) if explorer.is_hybrid(n)] == [6, 7, 14, 15]
    assert [
        n for n in range(4) if HybridRollout(GraftSettings(num_hybrid=4), num_leaves=4).is_hybrid(n)
    ] == [
        0,
        1,
        2,
        3,
    ]
    assert not any(
        HybridRollout(GraftSettings(num_hybrid=0), num_leaves=4).is_hybrid(n) for n in range(4)
    )
    counts = [
        sum(
            HybridRollout(GraftSettings(num_hybrid=h), num_leaves=16, num_starts=8).is_hybrid(n)
            for n in range(8)
        )
        for h in (0, 1, 3, 5, 16)
    ]
    assert counts == [0, 1, 2, 3, 8]  # rounded half up, at least one


def test_whole_trajectories_are_grafted_once() -> None:
    explorer = HybridRollout(
        GraftSettings(num_hybrid=1, probability=1.0, unit="trajectory"), num_leaves=1
    )
    first = step("0.0", [0.0])
    graft = step("0.0.0", [0.0], Origin.RETRIEVED, 0)
    own = step("0.0.0.0", [0.0])
    assert explorer.before_step(path(first)) == Graft(whole=True)
    assert explorer.before_step(path(first, graft, own)) == Generate()


# ---------------------------------------------------------------------- composition


def test_explorers_compose_in_order() -> None:
    entropy = EntropyBranching(
        EntropySettings(num_starts=2, probe_tokens=3, normaliser="none"), vocab_size=100
    )
    both = Composed(
        [
            entropy,
            HybridRollout(GraftSettings(num_hybrid=4, probability=1.0), num_leaves=4, num_starts=2),
        ]
    )
    assert both.starts(4) == Start(2)
    assert both.probe_tokens == 3
    assert both.before_step(path(step("0.0", [0.0]))) == Graft()
    twice = Composed(
        [
            entropy,
            EntropyBranching(
                EntropySettings(num_branches=4, probe_tokens=1, normaliser="none"), vocab_size=100
            ),
        ]
    )
    found = twice.after_probe(path(step("0.0", [0.0] * 3)), [0.0, 1.0, 1.0])
    assert (
        found is not None and found.num == 1
    )  # the second sees one token only, and that did not change
    found = twice.after_probe(path(step("0.0", [0.0] * 3)), [1.0, 1.0, 1.0])
    assert found is not None and found.num == 5
    assert (
        Composed([Independent(), HybridRollout(GraftSettings(), num_leaves=16)]).probe_tokens
        is None
    )


# ---------------------------------------------------------------------- who gets branches


def granted(rounds: Rounds) -> list[tuple[tuple[int, ...], int]]:
    return [(grant.place, grant.num) for grant in rounds.advance()]


def test_a_round_waits_for_every_live_leaf_of_the_tree() -> None:
    budget = Budget(4)
    budget.grant(Start(2))
    rounds = Rounds(budget)
    rounds.open_start("a")
    rounds.open_start("b")
    rounds.propose("a", 1, (0, 0), branch())
    assert granted(rounds) == []
    rounds.propose("b", 1, (0, 1), None)
    assert granted(rounds) == [((0, 0), 1)]
    assert granted(rounds) == []


def test_a_leaf_that_ends_is_not_waited_for_and_one_that_is_ahead_is_kept() -> None:
    budget = Budget(8)
    budget.grant(Start(2))
    rounds = Rounds(budget)
    rounds.open_start("a")
    rounds.open_start("b")
    rounds.propose("a", 1, (0, 0), branch())
    rounds.propose("a", 2, (0, 0, 0), branch())
    rounds.end("a")
    assert granted(rounds) == []
    rounds.end("b")
    first = rounds.advance()
    assert [grant.place for grant in first] == [(0, 0)]
    rounds.open_branch("c", first[0])
    assert granted(rounds) == []  # the new leaf is in round 2 too
    rounds.propose("c", 2, (0, 0, 1), branch())
    assert granted(rounds) == [((0, 0, 0), 1), ((0, 0, 1), 1)]


def test_a_short_budget_goes_by_the_order_in_the_tree() -> None:
    budget = Budget(6)
    budget.grant(Start(3))
    rounds = Rounds(budget)
    for number in range(3):
        rounds.open_start(number)
    for number in (2, 0, 1):
        rounds.propose(number, 1, (0, number), branch(2))
    assert granted(rounds) == [((0, 0), 2), ((0, 1), 1)]
    assert budget.state.num_leaves == 6
    assert granted(rounds) == []


def simulate(
    rounds: Rounds, budget: Budget, num_starts: int, order: random.Random, depth: int
) -> list[Any]:
    """Grows a tree of leaves that all propose, by a fixed rule on their place, in an arbitrary
    order of arrival."""
    opened: list[tuple[int, ...]] = []
    live: dict[tuple[int, ...], int] = {}

    def open_all() -> None:
        while grants := rounds.advance():
            for grant in grants:
                for number in range(grant.num):
                    leaf = (*grant.place, number + 1)
                    rounds.open_branch(leaf, grant)
                    opened.append(leaf)
                    live[leaf] = len(grant.place)

    for number in range(num_starts):
        rounds.open_start((0, number))
        live[(0, number)] = 1
    while live:
        leaf = order.choice(sorted(live))
        reached = live[leaf]
        if reached > depth:
            del live[leaf]
            rounds.end(leaf)
        else:
            place = (*leaf, *(0,) * (reached - len(leaf) + 1))[: reached + 1]
            wish = (
                branch(1 + sum(place) % 2, change=float(sum(place) % 3))
                if (sum(place) + reached) % 3
                else None
            )
            rounds.propose(leaf, reached, place, wish)
            live[leaf] = reached + 1
        open_all()
    assert budget.state.num_leaves <= budget.max_leaves
    return sorted(opened)


@given(seed=st.integers(0, 10_000), num_starts=st.integers(1, 5), extra=st.integers(0, 9))
def test_law_12_grants_do_not_depend_on_arrival(seed: int, num_starts: int, extra: int) -> None:
    grown = []
    for attempt in range(3):
        budget = Budget(num_starts + extra)
        budget.grant(Start(num_starts))
        luck = random.Random(seed * 3 + attempt)
        grown.append(simulate(Rounds(budget), budget, num_starts, luck, depth=3))
    assert grown[0] == grown[1] == grown[2]


class Forgetful:
    """An explorer without most of its members."""

    probe_tokens = None

    def starts(self, max_leaves: int) -> Start:
        return Start(max_leaves)


def test_an_explorer_of_your_own_without_a_member_is_refused_by_name() -> None:
    settings = ExploreSettings(explorers=["tests.explore.test_explore:Forgetful"])
    missing = "without after_probe, before_step, expands, fill, has_stages, is_hybrid"
    with raises_code("members-missing", match=missing):
        build_explorer(settings, vocab_size=10)
