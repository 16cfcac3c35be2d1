"""The policy-gradient objective that a recipe names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from treegraft.algo.losses import SurrogateTerms, clipped_surrogate
from treegraft.algo.objectives import (
    capped_surrogate,
    kept_gradient_surrogate,
    sequence_surrogate,
)
from treegraft.core.plugin import loaded, offered
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
    for name, find in offered("factors").items():
        if getattr(settings, name, 0.0):
            log_ratios = logprobs.detach() - old_logprobs
            advantages = advantages * loaded(find)(settings, log_ratios, owners, advantages)
    known = {**OBJECTIVES, **offered("objectives")}
    terms: SurrogateTerms = loaded(known.get(settings.objective, settings.objective))(
        settings, logprobs, old_logprobs, advantages, owners=owners, shaping=shaping
    )
    return terms


def _clip(settings: LossSettings, *columns: Tensor, owners: Tensor, shaping: Tensor) -> Any:
    low, high = settings.clip_low, settings.clip_high
    dual = settings.dual_clip
    return clipped_surrogate(
        *columns, clip_low=low, clip_high=high, dual_clip=dual, shaping=shaping
    )


def _gspo(settings: LossSettings, *columns: Tensor, owners: Tensor, shaping: Tensor) -> Any:
    low, high = settings.clip_low, settings.clip_high
    logprobs, old_logprobs, advantages = columns
    return sequence_surrogate(
        logprobs, old_logprobs, advantages, owners, clip_low=low, clip_high=high, shaping=shaping
    )


def _cispo(settings: LossSettings, *columns: Tensor, owners: Tensor, shaping: Tensor) -> Any:
    low, high = settings.clip_low, settings.clip_high
    return capped_surrogate(*columns, clip_low=low, clip_high=high, shaping=shaping)


def _gppo(settings: LossSettings, *columns: Tensor, owners: Tensor, shaping: Tensor) -> Any:
    return kept_gradient_surrogate(
        *columns,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        kept_low=settings.kept_low,
        kept_high=settings.kept_high,
        shaping=shaping,
    )


OBJECTIVES: Mapping[str, Callable[..., SurrogateTerms]] = {
    "clip": _clip,
    "gspo": _gspo,
    "cispo": _cispo,
    "gppo": _gppo,
}
