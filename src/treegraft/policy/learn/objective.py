"""The policy-gradient objective that a recipe names."""

from __future__ import annotations

import torch
from torch import Tensor

from treegraft.algo.appo import future_weights
from treegraft.algo.losses import SurrogateTerms, clipped_surrogate
from treegraft.algo.objectives import (
    capped_surrogate,
    kept_gradient_surrogate,
    sequence_surrogate,
)
from treegraft.settings.policy import LossSettings


def surrogate(
    settings: LossSettings,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    owners: Tensor,
    shaping: Tensor,
) -> SurrogateTerms:
    """Returns the loss of loss.objective per contribution.

    Args:
        logprobs, old_logprobs, advantages: [C] loss tokens of whole trajectories.
        owners: [C] the trajectory of each.
        shaping: [C] RAPO's 1 + m F.
    """
    if settings.future_weight:
        advantages = advantages * _future_weights(
            settings, logprobs.detach() - old_logprobs, advantages, owners
        )
    columns = (logprobs, old_logprobs, advantages)
    low, high = settings.clip_low, settings.clip_high
    if settings.objective == "gspo":
        return sequence_surrogate(*columns, owners, clip_low=low, clip_high=high, shaping=shaping)
    if settings.objective == "cispo":
        return capped_surrogate(*columns, clip_low=low, clip_high=high, shaping=shaping)
    if settings.objective == "gppo":
        return kept_gradient_surrogate(
            *columns,
            clip_low=low,
            clip_high=high,
            kept_low=settings.kept_low,
            kept_high=settings.kept_high,
            shaping=shaping,
        )
    return clipped_surrogate(
        *columns, clip_low=low, clip_high=high, dual_clip=settings.dual_clip, shaping=shaping
    )


def _future_weights(
    settings: LossSettings, log_ratios: Tensor, advantages: Tensor, owners: Tensor
) -> Tensor:
    """[C] the factors of `appo.future_weights`."""
    # In float64 and in order: the sums must not depend on the device or on the pack.
    factors = future_weights(
        log_ratios.double().tolist(),
        owners.tolist(),
        advantages.tolist(),
        weight=settings.future_weight,
        half_life=settings.future_half_life,
        highest=settings.future_highest,
    )
    return torch.tensor(factors, dtype=advantages.dtype, device=advantages.device)
