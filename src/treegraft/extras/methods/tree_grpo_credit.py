"""Tree-GRPO's advantages: within each first-level rollout, plus over the task."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from treegraft import Trajectory, group_advantages

Floats = npt.NDArray[np.float64]


def forest_advantages(
    rewards: Sequence[float], starts: Sequence[int] | Sequence[str], *, eps: float = 1e-6
) -> Floats:
    """Returns [leaves] Tree-GRPO's advantages: a leaf against those of its own first-level rollout,
    plus against all leaves of its task.

    A_i = (r_i - mean_start) / (std_start + eps) + (r_i - mean_task) / (std_task + eps)

    Source: Ji et al., Tree-GRPO, arXiv 2509.21240, sec. 3.3; the paper's trees of a prompt are the
    first-level rollouts of one tree here. A leaf that is alone below its start has 0 for the first
    term; the released code lets its raw reward through.

    Args:
        starts: [leaves] the first-level rollout above each leaf.
    """
    values = np.asarray(rewards, dtype=np.float64)
    owners = np.asarray(starts)
    advantages = group_advantages(values, eps=eps)
    for start in np.unique(owners):
        # A start with one leaf adds 0.
        advantages[owners == start] += group_advantages(values[owners == start], eps=eps)
    return advantages


def compared(members: Sequence[Trajectory], eps: float) -> Floats:
    """Returns [members] `forest_advantages` of their rewards."""
    rewards = [path.leaf.reward or 0.0 for path in members]
    return forest_advantages(rewards, [_own_start(path) for path in members], eps=eps)


def _own_start(path: Trajectory) -> str:
    """The first step of its own rollout, also where that began below stored steps."""
    return next(step.id for step in path.steps if step.before == path.start_id)
