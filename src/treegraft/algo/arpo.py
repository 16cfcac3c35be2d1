"""ARPO's mathematics: branching probabilities, and advantages of shared steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def entropy_change(
    current: Sequence[float] | Floats, initial: Sequence[float] | Floats, normaliser: float
) -> float:
    """Returns how much less sure the policy is than at the start of its trajectory.

    ΔH = Σ_j (H_j - H_j^initial) / normaliser      (Dong et al., ARPO, arXiv 2507.19849, sec. 3.1)

    The sum runs over the tokens that both have; the released code sums each list whole, so that a
    short step looks sure. 0 where one of them is empty.

    Args:
        current: [tokens] entropies of the first tokens after a tool result, in nats.
        initial: [tokens] of the trajectory's first tokens.
        normaliser: the vocabulary's size V (paper), ln V (released code), or 1.

    Raises:
        ValueError: an entropy that is not a finite number.
    """
    # fsum rounds once, so the order of the tokens cannot tip a decision at the threshold.
    pairs = zip(current, initial, strict=False)
    change = math.fsum(float(now) - float(then) for now, then in pairs) / normaliser
    if not math.isfinite(change):
        raise ValueError(
            f"entropy_change: got entropies {current!r} and {initial!r}; expected finite numbers,"
            " in nats"
        )
    return change


def branch_probability(change: float, base: float = 0.5, weight: float = 0.2) -> float:
    """Returns the probability of branching, 0..1.

    P = clip(α + β ΔH, 0, 1)        (ARPO, arXiv 2507.19849, sec. 3.1)

    The paper compares P without the clip with τ, which decides the same for τ in 0..1. The
    released code tosses a coin with the clipped P.
    """
    return min(1.0, max(0.0, base + weight * change))


def shared_advantages(
    advantages: Sequence[float] | Floats, descendants: Sequence[Sequence[int]]
) -> Floats:
    """Returns [steps] the advantage of each step under hard attribution: the mean over the
    trajectories that share it.

    A_shared = 1/d · Σ_{i below} A_i        (ARPO, Dong et al., arXiv 2507.19849, "hard" advantage)

    A step with one leaf below it carries that leaf's own advantage. One without any carries 0: no
    trajectory contains its tokens.

    Args:
        advantages: [leaves]
        descendants: for each step the indices of the leaves below it (a leaf's own step counts as
            below itself).
    """
    values = np.asarray(advantages, dtype=np.float64)
    means = np.zeros(len(descendants), dtype=np.float64)
    for step, below in enumerate(descendants):
        # A mean over no leaf would be NaN.
        if len(below):
            means[step] = values[list(below)].mean()
    return means
