"""Policy-gradient losses on contributions: one row per (token, trajectory that contains it)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to ± this before exp, so that one absurd token cannot overflow the sum."""
KL_LIMIT = 10.0
"""k3 values are clamped to ± this, as in verl; beyond it their gradient is 0."""


@dataclass(frozen=True, slots=True)
class SurrogateTerms:
    """Per contribution [C]: the loss, and the numbers for diagnostics."""

    losses: torch.Tensor
    ratios: torch.Tensor
    """ρ, before any shaping."""
    is_clipped: torch.Tensor
    """Where the clipped side was taken, so that the gradient is 0."""


def clipped_surrogate(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    shaping: torch.Tensor | None = None,
) -> SurrogateTerms:
    """Returns the clipped policy-gradient loss per contribution.

    ρ = π(y) / π_old(y),   r̂ = (1 + m F) ρ,   l = -min(r̂ A, clip(r̂, 1 - clip_low, 1 + clip_high) A)
    and with dual_clip c, for A < 0:   l = min(l, -c A)

    Source: Schulman et al., arXiv 1707.06347, eq. 7; separate ends from DAPO (Yu et al., arXiv
    2503.14476, eq. 10); dual clip from Ye et al., arXiv 1912.09729, eq. 3; r̂ from RAPO (arXiv
    2603.03078, eq. 8 and 11). The clip acts on r̂: a trajectory with grafts stands at 1 + m F where
    others stand at 1, so for A > 0 it reaches the upper end earlier. Dual clip too acts on r̂; where
    r̂ = c the gradient remains.

    Args:
        logprobs, old_logprobs, advantages: [C]; the last two detached.
        shaping: [C] 1 + m F of each contribution's trajectory, detached; None for 1.
    """
    ratios = torch.exp((logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    shaped = ratios if shaping is None else shaping * ratios
    plain = -shaped * advantages
    clipped = -shaped.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    # max of the negated terms: the minimum of the objective's two.
    losses = torch.maximum(plain, clipped)
    is_clipped = clipped > plain
    if dual_clip is not None:
        bound = -dual_clip * advantages
        is_bounded = (advantages < 0) & (losses > bound)
        losses = torch.where(is_bounded, bound, losses)
        is_clipped |= is_bounded
    return SurrogateTerms(losses, ratios.detach(), is_clipped)


def engine_correction(
    gaps: torch.Tensor, cap: float, lengths: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns [C] the factor of each contribution's policy-gradient loss, and [C] whether the
    cap was reached.

    w_t = min( π_old(y_t) / μ(y_t), C )            a weight per token
    w   = min( Π_t π_old(y_t) / μ(y_t), C )       a weight per trajectory, over its loss tokens

    with μ the distribution that the engine sampled from and π_old the same weights in the learner:
    truncated importance sampling (Ionides, 2008) per token (Yao et al., "Your efficient RL
    framework secretly brings you off-policy RL training", 2025), or per sequence. The
    latter alone is unbiased up to the cap, and its variance grows with the length (TRL's
    "sequence_truncate", verl's rollout_is = "sequence"). The weight is detached.

    Args:
        gaps: [C] log π_old - log μ.
        cap: C > 0.
        lengths: [N] contributions of each trajectory, in order, for a weight per trajectory; None
            for one per token.
    """
    difference = gaps.detach()
    if lengths is not None:
        # Over one trajectory after the other, in float64: the sum is the same however many follow.
        sums = torch.segment_reduce(difference.double(), "sum", lengths=lengths)
        difference = torch.repeat_interleave(
            sums.to(difference.dtype), lengths, output_size=len(difference)
        )
    ratios = torch.exp(difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    return ratios.clamp(max=cap), ratios > cap


def imitated_loss(
    logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    coef: float,
    form: Literal["log", "luffy"] = "log",
    gamma: float = 0.1,
) -> torch.Tensor:
    """Returns [D] the loss of learning from grafts: another agent's tokens are imitated where they
    paid.

    l = -c · max(A, 0) · log π             form="log"
    l = -c · max(A, 0) · π / (π + γ)   form="luffy"  (arXiv 2504.14945; gradient largest at π = γ)

    There is no ratio and no clip: nothing was sampled, so there is no old policy to stay near to.
    LUFFY applies its form to whole traces and with negative advantages too; here it is the
    agent-written tokens of grafted steps, and only where they paid. A is the trajectory's advantage
    as its own tokens carry it, RAPO's retrieval reward included (eq. 10), under soft attribution.

    Args:
        logprobs: [D] of the other agent's tokens under the policy, at the place of the graft.
        advantages: [D] of the trajectory with the graft, detached.
        coef, gamma: c and γ.
    """
    # π / (π + γ) = sigmoid(log π - log γ), which neither overflows nor divides by a vanishing sum.
    raised = logprobs if form == "log" else torch.sigmoid(logprobs - math.log(gamma))
    return -coef * advantages.clamp(min=0.0) * raised


def k3_divergence(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Returns [C] a low-variance, never negative estimate of KL(π || π_ref) per token.

    k3 = exp(-d) + d - 1,   d = log π - log π_ref

    (Schulman, "Approximating KL Divergence", 2020; GRPO eq. 4). Clamped to `KL_LIMIT`, which it
    reaches at d = -2.61 and d = 11: beyond them it has no gradient.
    """
    difference = (logprobs - ref_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (torch.exp(-difference) + difference - 1.0).clamp(-KL_LIMIT, KL_LIMIT)


Aggregation = Literal["token-mean", "sequence-mean", "sequence-sum"]


@dataclass(frozen=True, slots=True)
class Denominators:
    """The divisors of one optimiser step's losses, over all its micro-batches and
    ranks."""

    num_groups: int
    """Groups in the optimiser step, those without variance included."""
    weighted_tokens: float
    """Σ_i w_i |y_i|, |y_i| the loss tokens of the whole path."""
    length_constant: float
    """Tokens; the divisor of "sequence-sum"."""


def contribution_weights(
    leaf_weights: torch.Tensor,
    lengths: torch.Tensor,
    denominators: Denominators,
    aggregation: Aggregation,
) -> torch.Tensor:
    """Returns [N] the factor of every contribution of each trajectory, so that the loss is Σ factor
    · l.

    token-mean      w_i / Σ_j w_j |y_j|                        (DAPO, arXiv 2503.14476)
    sequence-mean   w_i / (|y_i| · groups)                     (GRPO, arXiv 2402.03300, eq. 3)
    sequence-sum    w_i / (constant · groups)                  (Dr.GRPO, arXiv 2503.20783)

    Args:
        leaf_weights: [N] w_i, which sum to 1 over each group.
        lengths: [N] |y_i|; a trajectory of length 0 gets factor 0.
    """
    # A step whose only loss tokens belong to leaves of weight 0 has no token to divide by.
    if aggregation == "token-mean":
        factors = leaf_weights / max(denominators.weighted_tokens, 1e-12)
    elif aggregation == "sequence-mean":
        factors = leaf_weights / (lengths.clamp(min=1.0) * denominators.num_groups)
    else:
        factors = leaf_weights / (denominators.length_constant * denominators.num_groups)
    return torch.where(lengths > 0, factors, torch.zeros_like(factors))
