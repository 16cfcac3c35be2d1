"""Means and 95 % intervals: over runs with other seeds (Student's t), and of a share of tasks
(Wilson)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from treegraft.extras.lab.report.records import MetricsLine, Record

LEVEL = 0.95
_Z = 1.959963984540054
"""Quantile of the normal distribution for `LEVEL`."""


@dataclass(frozen=True, slots=True)
class Point:
    """A mean over runs at one place: Point(x=10, mean=0.5, low=0.4, high=0.6, num=3); low and high
    None: no interval."""

    x: float
    mean: float
    low: float | None
    high: float | None
    num: int
    """Runs."""
    least: float
    """Smallest value of a run."""
    most: float
    """Largest value of a run."""


def point(x: float, values: Sequence[float]) -> Point:
    """Returns the mean of runs' values at one place with its interval. Raises ValueError: no
    values."""
    return Point(x, *student(values), len(values), min(values), max(values))


def student(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Returns (mean, low, high): mean ± t(n-1, 0.975) s / √n, the 95 % interval for the mean of
    runs with other seeds.

    s is the sample standard deviation (n - 1). One value has no interval. Raises ValueError: no
    values.
    """
    from scipy.stats import t

    if not values:
        raise ValueError("student: got no values; expected at least one")
    mean = statistics.fmean(values)
    if len(values) == 1:
        return mean, None, None
    quantile = float(t.ppf(0.5 + LEVEL / 2, len(values) - 1))
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def wilson(share: float, num: int) -> tuple[float, float]:
    """Returns the 95 % interval of a share of `num` tasks: (p + z²/2n ± z √(p (1 - p)/n + z²/4n²))
    / (1 + z²/n).

    E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22
    (1927).
    """
    if num < 1:
        raise ValueError(f"wilson: got {num} tasks; expected at least one")
    # A mean of shares may lie a rounding error above 1, and the root needs p (1 - p) >= 0.
    share = min(1.0, max(0.0, share))
    scale = 1 + _Z**2 / num
    centre = (share + _Z**2 / (2 * num)) / scale
    half = _Z * math.sqrt(share * (1 - share) / num + _Z**2 / (4 * num**2)) / scale
    return max(0.0, centre - half), min(1.0, centre + half)


def values_at(lines: Sequence[MetricsLine], key: str) -> dict[int, float]:
    """Returns the values of a metric by update, for updates that recorded it."""
    return {int(line["update"]): line[key] for line in lines if key in line}


def band(records: Sequence[Record], key: str) -> list[Point]:
    """Returns the mean of a metric with its interval, at the updates that all runs with this metric
    have reached."""
    return shared_points([values_at(record.lines, key) for record in records])


def shared_points(series: Sequence[Mapping[int, float]]) -> list[Point]:
    """Returns the mean of runs' values by update with its interval, at the updates that all runs
    with any value have."""
    series = [one for one in series if one]
    # Beyond the shared updates the mean would jump where a run ends.
    shared = sorted(set.intersection(*map(set, series))) if series else []
    return [point(update, [one[update] for one in series]) for update in shared]


def accuracy_band(records: Sequence[Record], key: str) -> list[Point]:
    """Returns the same of an accuracy; of a single run the interval is Wilson's over its held-out
    tasks, where their number is known."""
    found = band(records, key)
    num_eval = next((record.num_eval for record in records if values_at(record.lines, key)), None)
    if not num_eval:
        return found
    return [
        one if one.num > 1 else replace(one, low=low, high=high)
        for one in found
        for low, high in [wilson(one.mean, num_eval)]
    ]


def spent(lines: Sequence[MetricsLine], cost: str) -> dict[int, float]:
    """Returns by update the sum of a cost until then; lines without it count as 0."""
    totals = accumulate(line.get(cost, 0.0) for line in lines)
    return {int(line["update"]): total for line, total in zip(lines, totals, strict=True)}


def last_accuracy(record: Record, key: str) -> float | None:
    """Returns the accuracy of a run's last evaluation, None without one."""
    found = values_at(record.lines, key)
    return found[max(found)] if found else None


def paired(own: Sequence[Record], base: Sequence[Record], key: str) -> list[float]:
    """Returns for each seed that both have the difference of their last accuracies, at the last
    update that both evaluated."""
    # Runs of one seed share tasks and initial weights, so their difference has less variance.
    by_seed = {one.seed: values_at(one.lines, key) for one in base}
    found = []
    for record in own:
        if record.seed is None:
            continue
        mine, theirs = values_at(record.lines, key), by_seed.get(record.seed, {})
        if shared := set(mine) & set(theirs):
            found.append(mine[max(shared)] - theirs[max(shared)])
    return found
