"""Statistics of studies: values by hand and laws."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.examples import at_most

from treegraft.extras.statistics import (
    accuracy_at,
    bootstrap_interval,
    holm,
    permutation_test,
    student,
    wilson,
)

shares = st.integers(0, 8).map(lambda eighths: eighths / 8)


@given(st.lists(shares, min_size=2, max_size=12))
@at_most(30)
def test_bootstrap_interval_holds_the_mean_and_stays_within(values: list[float]) -> None:
    assert bootstrap_interval(values[:1]) is None
    low, high = bootstrap_interval(values) or (2, -1)
    assert min(values) <= low <= statistics.fmean(values) + 1e-9
    assert statistics.fmean(values) - 1e-9 <= high <= max(values)
    assert bootstrap_interval(values) == (low, high)


def test_bootstrap_interval_of_two_values() -> None:
    """The mean of two draws from {0, 1} is 0, 1/2 or 1 with 1/4, 1/2, 1/4."""
    assert bootstrap_interval([0, 1]) == (0, 1)
    assert bootstrap_interval([0, 1], level=0.4) == (0.5, 0.5)


def test_students_interval_by_hand() -> None:
    # mean 2, s = 1, n = 3; t(2, 0.975) = 4.3027 (any table), 4.3027 / sqrt(3) = 2.4841.
    mean, interval = student([1.0, 2.0, 3.0])
    assert mean == 2 and interval == pytest.approx((2 - 2.4841, 2 + 2.4841), abs=1e-4)
    assert student([0.7]) == (0.7, None)


def test_wilsons_interval_by_hand() -> None:
    # 5 of 10: centre 1/2; z = 1.95996; half = z sqrt(1/40 + z²/400) / (1 + z²/10) = 0.2634.
    assert wilson(0.5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    # None of n: from 0 to z² / (n + z²).
    assert wilson(0.0, 20) == pytest.approx((0.0, 3.8415 / 23.8415), abs=1e-4)
    # A mean of shares may lie a rounding error above 1.
    assert wilson(1.0 + 1e-16, 20)[1] == pytest.approx(1.0)


def exact(differences: Sequence[float]) -> float:
    """The share of all signs whose sum is as far from 0."""
    own = abs(sum(differences))
    signed = itertools.product((1, -1), repeat=len(differences))
    sums = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in signed]
    return sum(one >= own - 1e-12 for one in sums) / len(sums)


def test_permutation_test_tries_all_signs() -> None:
    assert permutation_test([1, 1, 1], [0, 0, 0]) == pytest.approx(2 / 8)
    assert permutation_test([3, 1, 2], [1, 1, 1]) == pytest.approx(exact([2, 0, 1]))
    assert permutation_test([1] * 10, [0.5] * 10) == pytest.approx(2 / 1024)
    assert permutation_test([1, 2], [1, 2]) == 1
    assert permutation_test([1], [0]) == 1


@given(st.lists(st.tuples(shares, shares), min_size=2, max_size=6))
@at_most(25)
def test_permutation_test_is_exact_and_symmetric(pairs: list[tuple[float, float]]) -> None:
    ours, theirs = zip(*pairs, strict=True)
    found = permutation_test(ours, theirs)
    assert found == pytest.approx(exact([a - b for a, b in pairs]))
    assert found == pytest.approx(permutation_test(theirs, ours))


def test_holm_by_hand() -> None:
    # Sorted .01 .02 .04: 3 * .01, max(.03, 2 * .02), max(.04, .04).
    assert holm([0.04, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert holm([0.6, 0.7]) == [1, 1]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), max_size=8))
@settings(deadline=None)
def test_holm_only_raises_and_keeps_the_order(values: list[float]) -> None:
    found = holm(values)
    assert all(a <= b <= 1 for a, b in zip(values, found, strict=True))
    ranked = sorted(zip(values, found, strict=True))
    assert [b for _, b in ranked] == sorted(b for _, b in ranked)


def test_accuracy_at_equal_cost() -> None:
    costs = [0, 100, 200]
    accuracies = [0.2, 0.4, 0.8]
    assert accuracy_at(costs, accuracies, 150) == pytest.approx(0.6)
    assert accuracy_at(costs, accuracies, 200) == 0.8
    assert accuracy_at(costs, accuracies, 201) is None
    assert accuracy_at([0, 0], [0.2, 0.9], 500) == 0.9
