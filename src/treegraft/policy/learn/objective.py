"""The policy-gradient objective that a recipe names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from treegraft.algo.loss import LossForm
from treegraft.algo.losses import SurrogateTerms, clipped_surrogate
from treegraft.algo.objectives import capped_surrogate, kept_gradient_surrogate, sequence_surrogate
from treegraft.core.errors import SettingError
from treegraft.core.registry import find, weighed
from treegraft.core.text import describe
from treegraft.settings.policy import LossSettings

Objective = Callable[..., SurrogateTerms]
"""Called with the table [loss], [C] log-probabilities, old ones and advantages, and by name owners
and shaping."""


def find_form(settings: LossSettings) -> LossForm:
    """Returns the loss that `settings` ask for.

    Raises:
        SettingError: loss.objective is an import path to nothing.
    """
    return LossForm(
        surrogate=find_surrogate(settings),
        engine_ratio_cap=settings.engine_ratio_cap,
        engine_ratio=settings.engine_ratio,
        kl_coef=settings.kl_coef,
        entropy_coef=settings.entropy_coef,
        graft_coef=settings.graft_coef,
        graft_form=settings.graft_form,
    )


def find_surrogate(settings: LossSettings) -> Callable[..., SurrogateTerms]:
    """Returns the loss per contribution that `settings` ask for.

    It is a function of [C] log-probabilities, old ones and advantages of the loss tokens of whole
    trajectories, and by name of `owners`, [C] the trajectory of each, `shaping`, [C] RAPO's
    1 + m F, and `positions`, [C] tokens before each on its path, tool results among them.

    Raises:
        SettingError: loss.objective is an import path to nothing.
    """
    objective: Objective = find(settings.objective, OBJECTIVES, "objective", "loss.objective")
    if ":" in settings.objective:
        # Before any work: its first real call comes after a whole rollout.
        _try(objective, settings)
    factors = [factor for factor, _ in weighed("factor", settings)]

    def surrogate(*columns: Tensor, owners: Tensor, shaping: Tensor, positions: Tensor) -> Any:
        logprobs, old, advantages = columns
        for factor in factors:
            # Detached: factors weigh tokens, and no gradient flows through them.
            gaps = logprobs.detach() - old
            advantages = advantages * factor(settings, gaps, owners, advantages, positions)
        return objective(settings, logprobs, old, advantages, owners=owners, shaping=shaping)

    return surrogate


def _try(objective: Objective, settings: LossSettings) -> None:
    """Calls an objective of the user's own on two tokens of one trajectory."""
    column = torch.tensor([-1.0, -2.0], dtype=torch.float32)
    owners = torch.tensor([0, 0])
    try:
        found: Any = objective(
            settings, column, column, -column, owners=owners, shaping=torch.ones_like(column)
        )
    except Exception as error:
        found = describe(error)
    if getattr(getattr(found, "losses", None), "shape", None) != column.shape:
        raise SettingError(
            f"loss.objective: got {found!r:.200} of '{settings.objective}', tried on two"
            " tokens; expected treegraft.parts.losses.SurrogateTerms, whose columns have an entry"
            " for each.",
            code="objective-result",
        )


def _clip(settings: LossSettings, *columns: Tensor, owners: Tensor, shaping: Tensor) -> Any:
    own = _limits(settings, shaping)
    return clipped_surrogate(*columns, dual_clip=settings.dual_clip, **own)


def _gspo(settings: LossSettings, *columns: Tensor, owners: Tensor, shaping: Tensor) -> Any:
    logprobs, old_logprobs, advantages = columns
    own = _limits(settings, shaping)
    return sequence_surrogate(logprobs, old_logprobs, advantages, owners, **own)


def _cispo(settings: LossSettings, *columns: Tensor, owners: Tensor, shaping: Tensor) -> Any:
    return capped_surrogate(*columns, **_limits(settings, shaping))


def _gppo(settings: LossSettings, *columns: Tensor, owners: Tensor, shaping: Tensor) -> Any:
    return kept_gradient_surrogate(
        *columns,
        kept_low=settings.kept_low,
        **_limits(settings, shaping),
    )


def _limits(settings: LossSettings, shaping: Tensor) -> dict[str, Any]:
    """What every objective here has: the ends of the clip, and what ratios are multiplied by."""
    return {"clip_low": settings.clip_low, "clip_high": settings.clip_high, "shaping": shaping}


OBJECTIVES: Mapping[str, Objective] = {"clip": _clip, "gspo": _gspo, "cispo": _cispo, "gppo": _gppo}
