"""GiGPO's mathematics: steps taken in the same state are compared with each other."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from treegraft import Trajectory, group_advantages

Floats = npt.NDArray[np.float64]
Scale = Literal["std", "none", "leave-one-out"]
"""How `group_advantages` divides."""


def discounted_returns(reward: float, num_steps: int, discount: float) -> list[float]:
    """Returns [steps] R_t = γ^(T - t) · R for an outcome reward R that comes with the last step.

    Source: Feng et al., GiGPO, arXiv 2505.10978, eq. 6, where no step but the last is rewarded.
    """
    return [reward * discount ** (num_steps - 1 - t) for t in range(num_steps)]


def step_weighted_advantages(
    rewards: Sequence[float], num_steps: Sequence[int], *, eps: float = 1e-6
) -> Floats:
    """Returns [trajectories] A_E with mean and deviation over the steps of a group, so that a long
    trajectory weighs as much as it has steps.

    A_E(i) = (R_i - μ) / (σ + eps),   μ = Σ_i n_i R_i / n,   σ² = Σ_i n_i (R_i - μ)² / (n - 1)

    Source: the code of GiGPO (Feng et al., arXiv 2505.10978), whose rows are steps, by default
    (`compute_mean_std_cross_steps`); with it off, and in the paper's eq. 3, each trajectory counts
    once, which is `group_advantages`. A group of equal rewards, or of one step, has 0.

    Args:
        num_steps: [trajectories] n_i, the steps that the policy wrote; n is their sum.
    """
    values = np.asarray(rewards, np.float64)
    counts = np.asarray(num_steps, np.float64)
    seen = values[counts > 0]
    if counts.sum() < 2 or (seen == seen[0]).all():
        return np.zeros_like(values)
    mean = float((counts * values).sum() / counts.sum())
    spread = math.sqrt(float((counts * (values - mean) ** 2).sum() / (counts.sum() - 1)))
    advantages: Floats = (values - mean) / (spread + eps)
    return advantages


def compared(members: Sequence[Trajectory], eps: float) -> Floats:
    """Returns [members] `step_weighted_advantages` of their rewards."""
    rewards = [path.leaf.reward or 0.0 for path in members]
    # Steps of others, such as stored ones, are no rows of the policy.
    counts = [sum(step.num_sampled > 0 for step in path.steps) for path in members]
    return step_weighted_advantages(rewards, counts, eps=eps)


def state_advantages(
    members: Sequence[Trajectory], *, discount: float, scale: Scale = "std", eps: float = 1e-6
) -> dict[tuple[int, str], float]:
    """Returns A_S for each (trajectory, step of the policy) of a group, by index and step id.

    A_S(i, t) = (R_t - mean R over the anchor group) / (std + eps)

    The anchor group has all steps of the group's trajectories that were taken in the same state
    (Feng et al., GiGPO, arXiv 2505.10978, eq. 5 to 7). A state is what the agent saw last:
    the results of the step before it, compared exactly; the first steps of all trajectories share
    theirs. A step that several trajectories share counts once for each of them, as if they had been
    sampled apart. Alone in its state, a step has 0.

    Args:
        members: the scored trajectories of one task.
        discount: γ, 0..1; below 1 it prefers the shorter of two ways to the same reward.
        scale: as for the outcome ("std", or "none" for the released default).
    """
    anchors: dict[tuple[str, ...], list[tuple[int, str, float]]] = defaultdict(list)
    for index, path in enumerate(members):
        seen: tuple[str, ...] = ()
        shown = []
        for step in path.steps[1:]:
            if step.num_sampled:
                shown.append((seen, step.id))
            # The results alone: the prompt is the same for all members.
            seen = tuple(one.text for one in step.content.observations)
        returns = discounted_returns(path.leaf.reward or 0.0, len(shown), discount)
        for (state, name), value in zip(shown, returns, strict=True):
            anchors[state].append((index, name, value))
    found: dict[tuple[int, str], float] = {}
    for instances in anchors.values():
        values: Floats = group_advantages(
            [value for _, _, value in instances], scale=scale, eps=eps
        )
        for (index, name, _), value in zip(instances, values, strict=True):
            found[index, name] = float(value)
    return found


DISCOUNT = 0.95
"""γ of the released code. Its ω, the weight of A_S, is 1."""


def states(
    members: Sequence[Trajectory], *, credit: Any, scale: Scale
) -> dict[tuple[int, str], float]:
    """Returns A_S by (number of the trajectory, step id)."""
    return state_advantages(members, discount=DISCOUNT, scale=scale)
