"""APPO's weights by what comes after, in the loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from treegraft.extras.methods.appo_math import future_weights

HALF_LIFE = 64.0
"""Loss tokens after which what follows counts half, as in APPO's code."""
HIGHEST = 1.2
"""Largest factor, as in APPO's code."""


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
        half_life=HALF_LIFE,
        highest=HIGHEST,
        limit=settings.dual_clip,
    )
    return torch.tensor(factors, dtype=advantages.dtype, device=advantages.device)
