"""Scores of trajectories, and their means with bootstrap intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treegraft import Trajectory

NUM_RESAMPLES = 10_000
"""Draws of a bootstrap."""
_Z2 = 1.959963985**2
_BATCH_DRAWS = 1_000_000
"""Indices drawn at once."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its 95 % bootstrap interval: Interval(mean=0.41, low=0.35, high=0.47)"""

    mean: float
    low: float
    high: float


def bootstrap(values: Sequence[float], *, seed: int = 0) -> Interval:
    """Returns the mean with its 95 % percentile interval over resampled items (Efron & Tibshirani,
    1993, ch. 13).

    `values` holds one number per item, the mean over its samples, because another test set would
    have other items.

    Raises:
        ValueError: no values.
    """
    return stratified_bootstrap([values], seed=seed)


def score_interval(values: Sequence[float]) -> Interval:
    """Returns `bootstrap` of scores from 0 to 1. Where all are 0 or all 1, resampled items have no
    spread: then it is Wilson's interval of a share, n / (n + z²) to 1 or 0 to z² / (n + z²) (E. B.
    Wilson, JASA 22, 1927).

    Raises:
        ValueError: no values.
    """
    found = bootstrap(values)
    if {*values} not in ({0.0}, {1.0}):
        return found
    width = _Z2 / (len(values) + _Z2)
    return Interval(found.mean, max(0.0, found.mean - width), min(1.0, found.mean + width))


def stratified_bootstrap(groups: Sequence[Sequence[float]], *, seed: int = 0) -> Interval:
    """Returns the unweighted mean of the groups' means, items resampled within each group, as for
    the average over sets."""
    if not groups or not all(len(group) for group in groups):
        raise ValueError("bootstrap: got a group without values; expected at least one number each")
    generator = np.random.default_rng(seed)
    draws = np.mean(
        [_resampled_means(np.asarray(group, dtype=float), generator) for group in groups], axis=0
    )
    # Percentiles, not a normal interval: shares near 0 and 1 are skewed.
    low, high = np.percentile(draws, [2.5, 97.5])
    return Interval(float(np.mean([np.mean(group) for group in groups])), float(low), float(high))


def _resampled_means(
    values: np.ndarray[Any, Any], generator: np.random.Generator
) -> np.ndarray[Any, Any]:
    # In batches: 10,000 draws of a large set at once would take gigabytes.
    rows = max(1, _BATCH_DRAWS // len(values))
    parts = []
    for start in range(0, NUM_RESAMPLES, rows):
        drawn = generator.integers(0, len(values), (min(rows, NUM_RESAMPLES - start), len(values)))
        parts.append(values[drawn].mean(axis=1))
    return np.concatenate(parts)


def pass_ks(num_samples: int) -> list[int]:
    """Returns the k of pass@k that are reported: 1, 3, 5 as in the papers, and powers of two."""
    return [k for k in sorted({1, 3, 5, *(2**n for n in range(1, 12))}) if k <= num_samples]


def call_limits(most: int) -> list[int]:
    """Returns the T of pass@(k, T) that are reported: 0, powers of two, and `most`; none where it
    is 0."""
    powers = (2**n for n in range(most.bit_length()))
    return sorted({0, most, *powers}) if most else []


def num_sampled_tokens(trajectory: Trajectory) -> int:
    """Returns how many of its tokens the policy sampled."""
    return sum(trajectory.sampled_mask)


def calls_by_tool(trajectory: Trajectory) -> Counter[str]:
    """Returns the calls that were run, by tool."""
    return Counter(
        call.name
        for content in trajectory.contents
        for call, _ in zip(content.calls, content.observations, strict=False)
    )
