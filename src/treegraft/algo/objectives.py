"""Policy-gradient objectives other than PPO's clip: sequence ratios, capped weights, gradients kept
past the clip."""

from __future__ import annotations

import torch
from torch import Tensor

from treegraft.algo.losses import LOG_RATIO_LIMIT, SurrogateTerms, clipped_surrogate

SEQUENCE_LOG_RATIO_LIMIT = 10.0
"""The mean log-ratio of a sequence is clamped to ± this before exp, as in verl."""


def sequence_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    owners: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    shaping: Tensor | None = None,
) -> SurrogateTerms:
    """Returns GSPO's loss per contribution, one ratio for the whole sequence.

    s_i     = exp( 1/|y_i| Σ_t log(π(y_t) / π_old(y_t)) )        (arXiv 2507.18071, eq. 7)
    s_{i,t} = sg[s_i] · π(y_t) / sg[π(y_t)]                       (eq. 14, GSPO-token)
    l       = -min(s_{i,t} A, clip(s_{i,t}, 1 - clip_low, 1 + clip_high) A)

    Source: Zheng et al., arXiv 2507.18071. The token form has the value of s_i and, where all
    tokens of a sequence share their advantage, the gradient of eq. 5; where they do not (hard
    attribution), it is the paper's GSPO-token. |y_i| counts loss tokens only. The clip's ends are
    far smaller than PPO's (3e-4 and 4e-4 in the paper), since a mean over tokens moves little.

    Args:
        logprobs, old_logprobs, advantages: [C]; the last two detached. All loss tokens of each
            sequence have to be among them.
        owners: [C] the sequence of each contribution.
        shaping: [C] RAPO's 1 + m F, which multiplies s; None for 1.
    """
    differences = (logprobs - old_logprobs).detach().double()
    lengths = torch.bincount(owners)
    sums = torch.bincount(owners, weights=differences)
    means = (sums / lengths.clamp(min=1)).clamp(-SEQUENCE_LOG_RATIO_LIMIT, SEQUENCE_LOG_RATIO_LIMIT)
    # The difference of log-probabilities that `clipped_surrogate` takes is then log s, with the
    # gradient of log π.
    moved = logprobs.detach() - means.to(logprobs.dtype)[owners]
    return clipped_surrogate(
        logprobs, moved, advantages, clip_low=clip_low, clip_high=clip_high, shaping=shaping
    )


def capped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    shaping: Tensor | None = None,
) -> SurrogateTerms:
    """Returns CISPO's loss per contribution: the clip acts on a detached weight, so that no token
    loses its gradient.

    l = -sg[ clip(r̂, 1 - clip_low, 1 + clip_high) ] · A · log π(y)    (arXiv 2506.13585, eq. 4, 5)

    Source: MiniMax-M1, arXiv 2506.13585; r̂ = (1 + m F) ρ as in `clipped_surrogate`. The paper
    leaves the lower end open, which is clip_low = 1. Others write the cap itself: TRL's 5.0 is
    clip_high = 4 here. `is_clipped` says where the weight was cut; the gradient is never 0 there.

    Args:
        logprobs, old_logprobs, advantages: [C]; the last two detached.
        shaping: [C] 1 + m F; None for 1.
    """
    ratios, shaped = _ratios(logprobs, old_logprobs, shaping)
    weights = shaped.clamp(1.0 - clip_low, 1.0 + clip_high).detach()
    losses = -weights * advantages * logprobs
    return SurrogateTerms(losses, ratios.detach(), weights != shaped.detach())


def kept_gradient_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    kept_low: float = 1.0,
    kept_high: float = 1.0,
    shaping: Tensor | None = None,
) -> SurrogateTerms:
    """Returns the clipped loss per contribution with a gradient left where the clip takes it away.

    Value: that of `clipped_surrogate`. Weight on -A ∇ log π(y):

    kept_low · (1 - clip_low)       where A < 0 and r̂ < 1 - clip_low
    kept_high · (1 + clip_high)     where A > 0 and r̂ > 1 + clip_high
    r̂                               elsewhere

    Sources: GPPO, kept_low = kept_high = 1 (Klear-Reasoner, arXiv 2508.07629); CE-GPPO, β₁ and β₂
    of its script .25 and 1 (arXiv 2509.20712); AEPO, 0 and 1: a hard clip below (arXiv 2510.14545).
    CE-GPPO's printed value carries its β, ours does not: the gradients are equal.

    Args:
        logprobs, old_logprobs, advantages: [C]; the last two detached.
        shaping: [C] 1 + m F; None for 1.
    """
    plain = clipped_surrogate(
        logprobs, old_logprobs, advantages, clip_low=clip_low, clip_high=clip_high, shaping=shaping
    )
    kept = torch.where(
        advantages < 0, kept_low * (1.0 - clip_low), kept_high * (1.0 + clip_high)
    ).to(logprobs.dtype)
    # Value 0, gradient that of log π.
    carrier = logprobs - logprobs.detach()
    losses = torch.where(plain.is_clipped, plain.losses - kept * advantages * carrier, plain.losses)
    return SurrogateTerms(losses, plain.ratios, plain.is_clipped)


def _ratios(
    logprobs: Tensor, old_logprobs: Tensor, shaping: Tensor | None
) -> tuple[Tensor, Tensor]:
    """ρ and r̂."""
    ratios = torch.exp((logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    return ratios, ratios if shaping is None else shaping * ratios
