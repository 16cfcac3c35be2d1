"""Statistics of paired runs: means, intervals, tests, and accuracy at equal cost.

Sources: interquartile mean and probability of improvement, Agarwal et al., arXiv 2108.13264; Holm,
Scand. J. Statist. 6 (1979).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

NUM_RESAMPLES = 10_000
SEED = 0
"""Of the resamples: one table is the same whenever it is printed."""
MOST_EXACT = 13
"""Pairs up to which all 2^n signs are tried."""
Values = Sequence[float]


def interquartile_mean(values: Values) -> float:
    """Returns the mean without the lowest and the highest quarter; floor(n / 4) values each are
    left out, so of ten values six count."""
    return float(stats.trim_mean(np.asarray(values, dtype=float), 0.25))


def bootstrap_interval(
    values: Values, *, statistic: Callable[..., Any] = np.mean, level: float = 0.95
) -> tuple[float, float] | None:
    """Returns the percentile bootstrap interval of a statistic; of differences of pairs it is the
    paired bootstrap. With few values it is somewhat too narrow; one value has none."""
    if len(values) < 2:
        return None
    drawn = np.random.default_rng(SEED).integers(len(values), size=(NUM_RESAMPLES, len(values)))
    found = statistic(np.asarray(values, dtype=float)[drawn], axis=1)
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def probability_of_improvement(ours: Values, theirs: Values) -> float:
    """Returns P(X > Y) + P(X = Y) / 2 for one run of ours and one of theirs, over all pairs of runs
    (Mann-Whitney's U / nm): 0.5 where neither is better."""
    x, y = np.asarray(ours, dtype=float)[:, None], np.asarray(theirs, dtype=float)[None, :]
    return float(((x > y) + 0.5 * (x == y)).mean())


def permutation_test(ours: Values, theirs: Values) -> float:
    """Returns the two-sided p of the mean paired difference when the sign of each is a coin: exact
    up to 13 pairs, so that the smallest is 2 / 2^n, by 10,000 draws beyond."""

    def mean_difference(x: npt.NDArray[Any], y: npt.NDArray[Any], axis: int) -> Any:
        return np.mean(x - y, axis=axis)

    x, y = np.asarray(ours, dtype=float), np.asarray(theirs, dtype=float)
    # Where all runs are equal the statistic has one value only.
    if np.array_equal(x, y):
        return 1.0
    if len(x) == 1:
        return 1.0
    found = stats.permutation_test(
        (x, y),
        mean_difference,
        permutation_type="samples",
        vectorized=True,
        n_resamples=2**MOST_EXACT if len(x) <= MOST_EXACT else NUM_RESAMPLES,
        rng=np.random.default_rng(SEED),
    )
    return float(found.pvalue)


def holm(p_values: Values) -> list[float]:
    """Returns p values corrected for their number, in the same order: of the sorted ones
    max over j <= i of (n - j) p_j with j from 0, at most 1."""
    corrected, highest = [0.0] * len(p_values), 0.0
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    for rank, place in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = highest
    return corrected


def accuracy_at(costs: Values, accuracies: Values, at: float) -> float | None:
    """Returns the accuracy at a cost, linear between evaluations.

    None where the run ended before: no curve is carried past its end. A run that spends none of
    this cost has its last accuracy at every cost.
    """
    if costs[-1] == 0.0:
        return accuracies[-1]
    if at > costs[-1]:
        return None
    return float(np.interp(at, costs, accuracies))


def area(costs: Values, accuracies: Values, upto: float) -> float | None:
    """Returns the mean accuracy over the costs from 0 to `upto`: the area under the accuracy-cost
    curve divided by `upto`. None, and runs without cost, as in `accuracy_at`."""
    end = accuracy_at(costs, accuracies, upto)
    if end is None or costs[-1] == 0.0 or upto <= 0.0:
        return end
    inner = [(cost, value) for cost, value in zip(costs, accuracies, strict=True) if cost < upto]
    places, values = zip(*[*inner, (upto, end)], strict=True)
    return float(np.trapezoid(values, places) / upto)
