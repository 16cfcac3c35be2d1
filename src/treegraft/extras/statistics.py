"""Statistics of runs: intervals, paired tests, and accuracy at equal cost.

Source: S. Holm, "A simple sequentially rejective multiple test procedure", Scand. J. Statist. 6
(1979).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

LEVEL = 0.95
NUM_RESAMPLES = 10_000
SEED = 0
"""Of the resamples: a table is the same whenever it is printed."""
MOST_EXACT = 13
"""Pairs up to which all 2^n signs are tried."""
Values = Sequence[float]
Interval = tuple[float, float]


def bootstrap_interval(values: Values, *, level: float = LEVEL) -> Interval | None:
    """Returns the percentile bootstrap interval of the mean; of differences of pairs it is the
    paired bootstrap. With few values it is somewhat too narrow; one value has none."""
    # Resampling one value gives that value.
    if len(values) < 2:
        return None
    found = stats.bootstrap(
        (np.asarray(values, dtype=float),),
        np.mean,
        confidence_level=level,
        n_resamples=NUM_RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(SEED),
    )
    low, high = found.confidence_interval
    return float(low), float(high)


def mean_of_means(groups: Sequence[Values]) -> tuple[float, Interval]:
    """Returns the unweighted mean of the groups' means with its percentile bootstrap interval,
    values resampled within each group (Efron & Tibshirani, 1993, ch. 13)."""

    def statistic(*samples: npt.NDArray[Any], axis: int) -> Any:
        return np.mean([np.mean(sample, axis=axis) for sample in samples], axis=0)

    whole = float(np.mean([np.mean(group) for group in groups]))
    # A single value has no spread, and scipy refuses one.
    samples = [np.resize(group, max(2, len(group))) for group in groups]
    found = stats.bootstrap(
        samples,
        statistic,
        confidence_level=LEVEL,
        n_resamples=NUM_RESAMPLES,
        method="percentile",
        # All draws at once of a large set would take gigabytes.
        batch=500,
        rng=np.random.default_rng(SEED),
    )
    low, high = found.confidence_interval
    return whole, (float(low), float(high))


def permutation_test(ours: Values, theirs: Values) -> float:
    """Returns the two-sided p of the mean paired difference when the sign of each is a coin: exact
    up to 13 pairs, so that the smallest is 2 / 2^n, by 10,000 draws beyond."""

    def mean_difference(x: npt.NDArray[Any], y: npt.NDArray[Any], axis: int) -> Any:
        return np.mean(x - y, axis=axis)

    x = np.asarray(ours, dtype=float)
    y = np.asarray(theirs, dtype=float)
    # The statistic has one value only; scipy refuses a single pair.
    if np.array_equal(x, y) or len(x) == 1:
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
    corrected = [0.0] * len(p_values)
    highest = 0.0
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    for rank, place in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = highest
    return corrected


def student(values: Values) -> tuple[float, Interval | None]:
    """Returns the mean and mean ± t(n-1, 0.975) s / √n, the interval for the mean of runs with
    other seeds. One value has no interval."""
    mean = statistics.fmean(values)
    if len(values) == 1:
        return mean, None
    quantile = float(stats.t.ppf(0.5 + LEVEL / 2, len(values) - 1))
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return mean, (mean - half, mean + half)


def wilson(share: float, num: int) -> Interval:
    """Returns the interval of a share of `num` tasks, which need not be a whole number of them
    (scipy's takes counts only): (p + z²/2n ± z √(p (1 - p)/n + z²/4n²)) / (1 + z²/n).

    E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22
    (1927).
    """
    z = float(stats.norm.ppf(0.5 + LEVEL / 2))
    # A mean of shares may lie a rounding error above 1, and the root needs p (1 - p) >= 0.
    share = min(1.0, max(0.0, share))
    scale = 1 + z**2 / num
    centre = (share + z**2 / (2 * num)) / scale
    half = z * math.sqrt(share * (1 - share) / num + z**2 / (4 * num**2)) / scale
    return max(0.0, centre - half), min(1.0, centre + half)


def accuracy_at(costs: Values, accuracies: Values, at: float) -> float | None:
    """Returns the accuracy at a cost, linear between evaluations.

    None if the run ended before: no curve is carried past its end. A run that spends none of this
    cost has its last accuracy at every cost.
    """
    if costs[-1] == 0.0:
        return accuracies[-1]
    if at > costs[-1]:
        return None
    return float(np.interp(at, costs, accuracies))
