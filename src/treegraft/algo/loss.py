"""The whole loss of a pass over packed trees: its terms, and their sum.

    L = Σ_c f_c · ( w_c l_c + β k3_c - η H_c ) + Σ_d f_d m_d

c runs over the contributions of a pass, one for each token with loss and trajectory that contains
it; d over those of imitated tokens. f is the share of a contribution's trajectory, so that the sum
over all passes of an optimiser step is the loss (`losses.contribution_weights`).

    l    policy     surrogate of the policy gradient       `losses.clipped_surrogate`, `objectives`
    w               truncated importance sampling          `losses.engine_correction`
    k3   kl         distance from the reference            `losses.k3_divergence`
    H    entropy    entropy of the policy, for a bonus
    m    imitation  other agents' tokens, where they paid  `losses.imitated_loss`

Stored successes, which are imitated without rollouts, have passes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from treegraft.algo.losses import (
    SurrogateTerms,
    engine_correction,
    imitated_loss,
    k3_divergence,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossForm:
    """The settings of the loss."""

    surrogate: Callable[..., SurrogateTerms]
    """The function of l: of [C] log-probabilities, old ones and advantages, and by name of owners,
    shaping and positions."""
    engine_ratio_cap: float | None
    """The cap of w; None for w = 1."""
    engine_ratio: Literal["token", "sequence"]
    """The unit that has a w of its own."""
    kl_coef: float
    """β"""
    entropy_coef: float
    """η; 0 for none."""
    graft_coef: float
    """The weight of imitation, which is part of m; `graft_form` says what is
    raised (see `losses.imitated_loss`)."""
    graft_form: Literal["log", "luffy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImitatedBatch:
    """The contributions of imitated tokens."""

    tokens: Tensor
    """[D] which of the unique imitated tokens."""
    owners: Tensor
    """[D] which trajectory."""
    advantages: Tensor
    """[D] of the trajectory's leaf."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossBatch:
    """What is known of a pass before the policy scores it. C contributions of sampled tokens, D of
    imitated ones, N trajectories, U unique sampled tokens, L unique imitated ones."""

    tokens: Tensor
    """[C] which of the unique sampled tokens."""
    owners: Tensor
    """[C] which trajectory; in order."""
    advantages: Tensor
    """[C]"""
    shaping: Tensor
    """[C] 1 + m F of the trajectory (RAPO, arXiv 2603.03078, eq. 8)."""
    positions: Tensor
    """[C] tokens before it on its path."""
    sampling_logprobs: Tensor
    """[U] of the engine."""
    factors: Tensor
    """[N] f of each trajectory's contributions."""
    imitated: ImitatedBatch | None = None
    """None if nothing is imitated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassScores:
    """Log-probabilities and entropies of a pass; those of the policy have gradients."""

    logprobs: Tensor
    """[U] of the sampled tokens."""
    entropies: Tensor
    """[U] in nats."""
    old_logprobs: Tensor
    """[U] before the optimiser step, detached."""
    imitated_logprobs: Tensor
    """[L] of the imitated tokens; L may be 0."""
    ref_logprobs: Tensor | None = None
    """[U] of the reference, detached; None without a reference."""


def loss_terms(batch: LossBatch, scores: PassScores, settings: LossForm) -> dict[str, Tensor]:
    """Returns the terms of the loss, each without its weight, and what is measured of them.

    Ours: one dictionary for all terms; the papers of each are at its function.

    policy              [C] w l
    kl                  [C] k3, with a reference alone
    entropy             [C] H
    imitation           [D] m, if something is imitated
    ratios              [C] ρ = π(y) / π_old(y), detached
    is_clipped          [C] whether the clip takes the gradient away
    is_capped           [C] whether w reached its cap; without a cap nothing
    imitated_logprobs   [D] detached
    """
    # Not logprobs[tokens]: where rows repeat, its backward pass adds them up in an order that two
    # threads do not repeat.
    logprobs = scores.logprobs.index_select(0, batch.tokens)
    old_logprobs = scores.old_logprobs.index_select(0, batch.tokens)
    surrogate = settings.surrogate(
        logprobs,
        old_logprobs,
        batch.advantages,
        owners=batch.owners,
        shaping=batch.shaping,
        positions=batch.positions,
    )
    terms = {
        "policy": surrogate.losses,
        "entropy": scores.entropies.index_select(0, batch.tokens),
        "ratios": surrogate.ratios,
        "is_clipped": surrogate.is_clipped,
    }
    # Engine and learner differ at equal weights too, in bfloat16 by some per cent a token.
    if settings.engine_ratio_cap is not None:
        gaps = (scores.old_logprobs - batch.sampling_logprobs).index_select(0, batch.tokens)
        by_path = settings.engine_ratio == "sequence"
        lengths = torch.bincount(batch.owners, minlength=len(batch.factors)) if by_path else None
        weights, is_capped = engine_correction(gaps, settings.engine_ratio_cap, lengths)
        terms["policy"] = surrogate.losses * weights
        terms["is_capped"] = is_capped
    if scores.ref_logprobs is not None:
        ref_logprobs = scores.ref_logprobs.index_select(0, batch.tokens)
        terms["kl"] = k3_divergence(logprobs, ref_logprobs)
    if batch.imitated is not None:
        imitated = scores.imitated_logprobs.index_select(0, batch.imitated.tokens)
        terms["imitated_logprobs"] = imitated.detach()
        terms["imitation"] = imitated_loss(
            imitated,
            batch.imitated.advantages,
            coef=settings.graft_coef,
            form=settings.graft_form,
        )
    return terms


def total_loss(terms: Mapping[str, Tensor], batch: LossBatch, settings: LossForm) -> Tensor:
    """Returns L, the sum of the terms with their weights.

    Ours: L runs over contributions of packed trees; for trajectories apart it is the published sum.
    """
    losses = terms["policy"]
    if "kl" in terms:
        losses = losses + settings.kl_coef * terms["kl"]
    # Without a bonus the entropies need no backward pass.
    if settings.entropy_coef:
        losses = losses - settings.entropy_coef * terms["entropy"]
    total = (batch.factors[batch.owners] * losses).sum()
    if batch.imitated is not None:
        total = total + (batch.factors[batch.imitated.owners] * terms["imitation"]).sum()
    return total
