"""Rewards compared with those of a group, of a first-level rollout, or of the whole batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

Scale = Literal["std", "none", "leave-one-out"]


def group_advantages(
    rewards: Sequence[float] | Floats, *, scale: Scale = "std", eps: float = 1e-6
) -> Floats:
    """Returns [leaves] how much better each leaf did than its group.

    A_i = (r_i - mean r) / (std r + eps)       scale="std" (GRPO)
    A_i = r_i - mean r                         scale="none" (Dr.GRPO)
    A_i = r_i - 1/(n-1) Σ_{j≠i} r_j            scale="leave-one-out" (RLOO)

    Sources: Shao et al., arXiv 2402.03300, sec. 4.1; Liu et al., arXiv 2503.20783, sec. 3.2;
    Ahmadian et al., arXiv 2402.14740, eq. 8. The last is n / (n - 1) times the one before it. std
    is the sample standard deviation (divisor n - 1), as in verl and the ARPO family. A group of
    one, or one whose rewards are all equal, has advantage 0; verl lets the raw reward of a
    singleton through.

    Raises:
        ValueError: a reward that is not a finite number.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise ValueError(
            f"group_advantages: got rewards {rewards!r}; expected a flat list of finite numbers"
        )
    # Compared, not std == 0: rounding can leave a spread of 1e-17 where all rewards are equal, so
    # that their advantages would not be exactly 0 and the group would not be skipped.
    if values.size < 2 or (values == values[0]).all():
        return np.zeros_like(values)
    spread = {
        "std": float(values.std(ddof=1)) + eps,
        "none": 1.0,
        "leave-one-out": (values.size - 1) / values.size,
    }[scale]
    advantages: Floats = (values - values.mean()) / spread
    return advantages


def by_place(places: Sequence[str]) -> list[list[int]]:
    """Returns the indices of the leaves that began at each place, by the first leaf of each.

    Source: AXPO (arXiv 2605.28774), whose ablation has 53.9 with groups of their own for rollouts
    that begin elsewhere, and 51.2 with one group for all.
    """
    found: dict[str, list[int]] = {}
    for index, place in enumerate(places):
        found.setdefault(place, []).append(index)
    return list(found.values())


def whitened(
    groups: Sequence[Sequence[float]],
    lengths: Sequence[Sequence[int]],
    *,
    has_baseline: bool,
    eps: float = 1e-8,
) -> list[Floats]:
    """Returns, for each group, [leaves] advantages whitened over all loss tokens of the batch.

    x_i = r_i                  REINFORCE++
    x_i = r_i - mean_group r   REINFORCE++-baseline
    A_i = (x_i - μ) / sqrt(σ² + eps),  μ and σ² the mean and variance of x over tokens: each leaf
    counts |y_i| times

    Source: Hu et al., arXiv 2501.03262, sec. 3.2, without discount (γ = 1) and without the KL
    penalty in the reward, for which there is loss.kl_coef. The variance has divisor n - 1, as in
    verl and OpenRLHF. Batches of one token, or whose x are all equal, have advantage 0.

    Args:
        groups: for each group [leaves] rewards.
        lengths: for each group [leaves] |y_i|, the loss tokens of the whole path.
    """
    values = [np.asarray(group, dtype=np.float64) for group in groups]
    if has_baseline:
        values = [group - group.mean() if group.size else group for group in values]
    every = np.concatenate([*values, np.empty(0)])
    counts = np.asarray([length for group in lengths for length in group], dtype=np.float64)
    total = counts.sum()
    if total < 2 or (every[counts > 0] == every[counts > 0][0]).all():
        return [np.zeros_like(group) for group in values]
    # Over tokens, as in the paper: a long trajectory counts more than a short one.
    mean = (counts * every).sum() / total
    variance = (counts * (every - mean) ** 2).sum() / (total - 1)
    return [(group - mean) / math.sqrt(variance + eps) for group in values]
