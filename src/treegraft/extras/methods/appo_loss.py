"""APPO's weights by what comes after, in the loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from treegraft.extras.methods.appo_math import future_weights


def future_factors(
    settings: Any, log_ratios: Tensor, owners: Tensor, advantages: Tensor, positions: Tensor
) -> Tensor:
    """Returns [C] the factors of `future_weights`, by the table [loss]."""
    # In float64 and in order: the sums must not depend on the device or on the pack.
    factors = future_weights(
        log_ratios.double().tolist(),
        owners.tolist(),
        advantages.tolist(),
        positions.tolist(),
        weight=settings.future_weight,
        half_life=settings.future_half_life,
        highest=settings.future_highest,
        limit=settings.dual_clip,
    )
    return torch.tensor(factors, dtype=advantages.dtype, device=advantages.device)
