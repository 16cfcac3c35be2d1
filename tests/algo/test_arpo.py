"""ARPO's mathematics by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.examples import at_most

from treegraft.algo.arpo import branch_probability, entropy_change, shared_advantages


def test_entropy_change_by_hand() -> None:
    # (1.5 - 1) + (0.5 - 1) + (2 - 0.5) = 1.5
    assert entropy_change([1.5, 0.5, 2.0], [1.0, 1.0, 0.5], 1.0) == 1.5
    assert entropy_change([1.5, 0.5, 2.0], [1.0, 1.0, 0.5], 100) == pytest.approx(0.015)
    assert entropy_change(np.array([0.25]), np.array([0.75]), math.log(2)) == pytest.approx(
        -0.5 / math.log(2)
    )


def test_the_sum_runs_over_the_common_length() -> None:
    """The tokens that only one of them has do not count: a short step is not a sure one."""
    assert entropy_change([1.0, 1.0], [0.5, 0.5, 9.0, 9.0], 1.0) == 1.0
    assert entropy_change([1.0, 9.0, 9.0], [0.5], 1.0) == 0.5
    assert entropy_change([], [0.5], 1.0) == entropy_change([0.5], [], 1.0) == 0.0


def test_branch_probability_by_hand() -> None:
    # alpha + beta · change, held to 0..1.
    assert branch_probability(0.0) == 0.5
    assert branch_probability(0.5) == pytest.approx(0.6)
    assert branch_probability(-0.5) == pytest.approx(0.4)
    assert branch_probability(3.0) == 1.0
    assert branch_probability(-3.0) == 0.0
    assert branch_probability(1.0, base=0.1, weight=0.05) == pytest.approx(0.15)


@given(st.floats(-1e-5, 1e-5))
@at_most(60)
def test_with_the_papers_constants_any_rise_branches(change: float) -> None:
    """α = τ = 0.5: P > τ says the same as ΔH > 0, down to changes that floating point can tell from
    none beside 0.5."""
    if abs(change) > 1e-14:
        assert (branch_probability(change) > 0.5) == (change > 0)


def test_shared_advantages_by_hand() -> None:
    """Leaves 1, -1, 4; the root above all (4/3), a step above the first two (0), one for each leaf,
    and one above nothing."""
    shared = shared_advantages([1.0, -1.0, 4.0], [[0, 1, 2], [0, 1], [0], [1], [2], []])
    assert shared.tolist() == pytest.approx([4 / 3, 0.0, 1.0, -1.0, 4.0, 0.0])
    assert shared_advantages([], []).tolist() == []
    assert shared_advantages(np.array([0.1]), [np.array([0])]).tolist() == [0.1]  # type: ignore[list-item]


def test_refusals() -> None:
    with pytest.raises(ValueError, match="expected finite numbers"):
        entropy_change([math.nan], [1.0], 1.0)
