"""RAPO's mathematics by hand: equations 5 to 10 and every variant."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.examples import at_most
from tests.support.trees import Part, build_tree

from treegraft.algo.rapo import (
    VARIANTS,
    combined_advantages,
    graft_neighbours,
    inexact_neighbours,
    inexact_steps,
    path_retrieval_reward,
    path_retrieved_frac,
    retrieval_reward,
    shaping_factor,
)
from treegraft.core.types import EntropyKind, Status, Trajectory


@pytest.mark.parametrize(
    ("variant", "before", "after", "expected"),
    [
        # H- = 2, H+ = 1: ΔH = 1/2, g = tanh(1); H- = 2, H+ = 3: ΔH = -1/2.
        ("paper", 2.0, 1.0, 2 * math.tanh(1.0)),
        ("paper", 2.0, 3.0, -2 * math.tanh(1.0)),
        ("paper", 2.0, 2.0, 0.0),
        ("paper", 1.25, 1.0, 0.474936083),  # 1.25 tanh(0.4)
        ("paper", 2.0, 0.0, 2 * math.tanh(2.0)),  # certain afterwards: the most it can be
        (
            "paper",
            0.5,
            0.25,
            0.5 * math.tanh(1.0),
        ),  # the same relative fall where the policy was surer
        ("inverted_entropy", 2.0, 1.0, -2 * math.tanh(1.0)),
        ("inverted_entropy", 2.0, 3.0, 2 * math.tanh(1.0)),
        ("inverted_timing", 2.0, 1.0, math.tanh(1.0) / 2),
        ("inverted_timing", 0.5, 0.25, 2 * math.tanh(1.0)),
        ("inverted_both", 2.0, 1.0, -math.tanh(1.0) / 2),
        ("inverted_both", 0.5, 0.75, 2 * math.tanh(1.0)),
        ("no_quality", 2.0, 1.0, 2.0),
        ("no_quality", 2.0, 3.0, 2.0),
        ("no_timing", 2.0, 1.0, math.tanh(1.0)),
        ("no_timing", 0.5, 0.25, math.tanh(1.0)),
        ("none", 2.0, 1.0, 0.0),
    ],
)
def test_retrieval_reward(variant: str, before: float, after: float, expected: float) -> None:
    reward = retrieval_reward(before, after, variant=variant)  # type: ignore[arg-type]
    assert type(reward) is float and reward == pytest.approx(expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_policy_that_was_certain_gets_nothing(variant: str) -> None:
    for before in (0.0, -1e-9):
        assert retrieval_reward(before, 1.0, variant=variant) == 0.0  # type: ignore[arg-type]


@given(st.floats(1e-6, 20), st.floats(0, 20))
@at_most(100)
def test_the_papers_reward_is_bounded_by_the_entropy_before(before: float, after: float) -> None:
    reward = retrieval_reward(before, after)
    assert abs(reward) <= before
    assert (reward > 0) == (after < before) or abs(after - before) < 1e-12 * before
    assert retrieval_reward(before, after, variant="inverted_entropy") == -reward


def test_combined_advantages_by_hand() -> None:
    """Z = 3, 1, 1, -1: mean 1, sample variance 8/3; z = sqrt(3/2) (1, 0, 0, -1)."""
    z = math.sqrt(1.5)
    combined = combined_advantages([1.0, -1.0, 1.0, -1.0], [3.0, 1.0, 1.0, -1.0], eps=0.0)
    assert combined.tolist() == pytest.approx([1 + 0.2 * z, -1.0, 1.0, -(1 - 0.2 * z)])
    doubled = combined_advantages(np.array([1.0, 2.0]), np.array([1.0, 0.0]), weight=1.0, eps=0.0)
    # z = ± 1/2 / sqrt(1/2) = ± 1/sqrt(2)
    assert doubled.tolist() == pytest.approx([1 + 1 / math.sqrt(2), 2 * (1 - 1 / math.sqrt(2))])
    # eps stands beside the deviation: 1/2 / (sqrt(1/2) + 1/2)
    assert combined_advantages([1.0, 1.0], [1.0, 0.0], weight=1.0, eps=0.5)[0] == pytest.approx(
        1 + 0.5 / (math.sqrt(0.5) + 0.5)
    )


def test_a_sign_can_turn_only_in_large_groups() -> None:
    """One rollout below n - 1 equal ones has z = -(n - 1) / sqrt(n): 1 + z / 5 turns negative from
    n = 27."""
    for size, turns in ((26, False), (27, True)):
        assert (
            combined_advantages([1.0] * size, [-1.0] + [0.0] * (size - 1), eps=0.0)[0] < 0
        ) == turns


@pytest.mark.parametrize("rewards", [[0.0, 0.0], [0.1, 0.1]])
def test_equal_retrieval_rewards_change_nothing(rewards: list[float]) -> None:
    assert combined_advantages([0.7, -0.7], rewards).tolist() == [0.7, -0.7]
    assert combined_advantages([0.7], [0.3]).tolist() == [0.7]
    assert combined_advantages([], []).tolist() == []


def test_shaping_factor_by_hand() -> None:
    assert shaping_factor(0.0) == 1.0
    assert shaping_factor(0.5) == pytest.approx(1.025)
    assert shaping_factor(1.0, weight=0.3) == pytest.approx(1.3)


def test_refusals() -> None:
    with pytest.raises(
        ValueError,
        match="variant is 'best'; expected one of paper, inverted_entropy, inverted_timing",
    ):
        retrieval_reward(1.0, 1.0, variant="best")  # type: ignore[arg-type]
    for entropies in ((math.nan, 1.0), (1.0, math.inf)):
        with pytest.raises(ValueError, match="expected finite numbers, in nats"):
            retrieval_reward(*entropies)
    with pytest.raises(ValueError, match="got 2 outcome advantages and 1 retrieval rewards"):
        combined_advantages([1.0, 2.0], [1.0])
    for share in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="expected a share"):
            shaping_factor(share)


# ---------------------------------------------------------------------- on paths


def two_grafts() -> list[Trajectory]:
    """Steps of entropy 2, graft, 1, graft, then a branch of entropy 1/2 and one that failed; beside
    it an answer at once.

    Tokens after the prompt on the first path: s s t | r r r | s | r | s t, so F = 4/10.
    """
    second = Part.of("r", Part("st", entropies=[0.5]), Part("", status=Status.FAILED))
    first = Part.of("rrr", Part.of("s", second, entropies=[1.0]))
    tree = build_tree(Part.of("pp", Part.of("sst", first, entropies=[1.5, 2.5]), Part("s")))
    return tree.trajectories()


def test_a_path_averages_over_its_grafts() -> None:
    """Grafts 2 -> 1 and 1 -> 1/2: Z = (2 tanh(1) + tanh(1)) / 2; the failed branch holds the first
    one only."""
    whole, failed, plain = two_grafts()
    assert path_retrieval_reward(whole) == pytest.approx(1.5 * math.tanh(1.0))
    assert path_retrieval_reward(failed) == pytest.approx(2 * math.tanh(1.0))
    assert path_retrieval_reward(plain) == 0.0
    assert path_retrieval_reward(whole, "no_timing") == pytest.approx(math.tanh(1.0))
    assert path_retrieval_reward(whole, "none") == 0.0


def test_neighbours_are_steps_the_policy_wrote() -> None:
    whole, failed, plain = two_grafts()
    assert [(b.id, a.id) for b, a in graft_neighbours(whole.steps)] == [
        ("0.0", "0.0.0.0"),
        ("0.0.0.0", "0.0.0.0.0.0"),
    ]
    # Nothing was sampled after the second graft of the failed path.
    assert [(b.id, a.id) for b, a in graft_neighbours(failed.steps)] == [("0.0", "0.0.0.0")]
    assert graft_neighbours(plain.steps) == []
    # Two grafts in a row (another explorer's choice) have the same neighbours; one with nothing
    # sampled before it has none.
    doubled = build_tree(
        Part.of("p", Part.of("s", Part.of("r", Part.of("r", Part("s")))), Part.of("r", Part("s")))
    )
    paths = doubled.trajectories()
    assert [(b.id, a.id) for b, a in graft_neighbours(paths[0].steps)] == [("0.0", "0.0.0.0.0")] * 2
    assert graft_neighbours(paths[1].steps) == []


def test_entropies_of_the_top_tokens_are_found() -> None:
    """The engine knew the top tokens alone in the step before the graft and in one that follows no
    graft; only steps that were sampled count."""
    tree = build_tree(Part.of("pp", Part.of("s", Part.of("r", Part("s"))), Part("s")))
    exact = tree.steps
    assert [step.id for step in exact] == ["0", "0.0", "0.0.0", "0.0.0.0", "0.1"]
    assert inexact_neighbours(tree) == inexact_steps(tree) == set()
    kinds = [*[EntropyKind.TOP_K] * 3, EntropyKind.EXACT, EntropyKind.TOP_K]
    steps = [replace(step, entropy_kind=kind) for step, kind in zip(exact, kinds, strict=True)]
    tree = replace(tree, steps=tuple(steps))
    assert inexact_neighbours(tree) == {"0.0"}
    assert inexact_steps(tree) == {"0.0", "0.1"}


def test_the_retrieved_share_counts_all_tokens_after_the_prompt() -> None:
    whole, failed, plain = two_grafts()
    assert path_retrieved_frac(whole) == pytest.approx(4 / 10)
    assert path_retrieved_frac(failed) == pytest.approx(4 / 8)
    assert path_retrieved_frac(plain) == 0.0
    empty = build_tree(Part.of("pp", Part("", status=Status.FAILED))).trajectories()[0]
    assert path_retrieved_frac(empty) == 0.0
