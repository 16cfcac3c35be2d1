"""RAPO's mathematics: retrieval rewards, combined advantages and importance shaping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import get_args

import numpy as np
import numpy.typing as npt

from treegraft.core.types import (
    EntropyKind,
    Origin,
    RetrievalVariant,
    Step,
    StoredCause,
    Trajectory,
    Tree,
)

Floats = npt.NDArray[np.float64]

VARIANTS: tuple[RetrievalVariant, ...] = get_args(RetrievalVariant)


def retrieval_reward(
    entropy_before: float, entropy_after: float, *, variant: RetrievalVariant = "paper"
) -> float:
    """Returns how much a graft helped: it lowers the entropy of the steps around it, where that was
    high.

    ΔH = -(H₊ - H₋) / H₋        (RAPO, arXiv 2603.03078, eq. 5)
    g  = tanh(2 ΔH)              (eq. 6, quality)
    Z  = g · H₋                  (eq. 7, quality times timing)

    The paper's ablations by name, the formulas as we read its words: "inverted_entropy" turns the
    sign of ΔH; "inverted_timing" is g / H₋, which grows without bound as H₋ falls to 0;
    "inverted_both" does the two (Table 3's "H low, ΔH up"); "no_quality" is H₋; "no_timing" is g;
    "none" is 0.

    Args:
        entropy_before: H₋, mean entropy of the policy's tokens in its last step before the graft,
            in nats; at 0 or below, Z is 0 in all variants.
        entropy_after: H₊, the same of its first step after the graft.

    Raises:
        ValueError: an unknown variant, or an entropy that is not a finite number.
    """
    if not (math.isfinite(entropy_before) and math.isfinite(entropy_after)):
        raise ValueError(
            f"retrieval_reward: got entropies {entropy_before} and {entropy_after}; expected finite"
            " numbers, in nats"
        )
    if variant not in VARIANTS:
        raise ValueError(
            f"retrieval_reward: variant is '{variant}'; expected one of {', '.join(VARIANTS)}"
        )
    before = float(entropy_before)
    after = float(entropy_after)
    # At 0 eq. 5 has no value, but Z, at most H₋, tends to 0; rounding gives entropies just below 0.
    if before <= 0.0 or variant == "none":
        return 0.0
    change = -(after - before) / before
    is_turned = variant in ("inverted_entropy", "inverted_both")
    quality = math.tanh(2.0 * (-change if is_turned else change))
    if variant == "no_quality":
        return before
    if variant == "no_timing":
        return quality
    return quality / before if variant in ("inverted_timing", "inverted_both") else quality * before


def combined_advantages(
    outcome_advantages: Sequence[float] | Floats,
    retrieval_rewards: Sequence[float] | Floats,
    weight: float = 0.2,
    eps: float = 1e-6,
) -> Floats:
    """Returns [leaves] the outcome's advantages, strengthened where retrieval went better than in
    the rest of the group.

    A_ret,i = (Z_i - mean Z) / (std Z + eps)      (RAPO, arXiv 2603.03078, eq. 9)
    A_i     = (1 + a A_ret,i) · A_acc,i           (eq. 10)

    std is the sample standard deviation (divisor n - 1), as in `group_advantages`; eps is ours (the
    paper prints none). Where all Z are equal, as without any graft, the outcome's advantages come
    back unchanged. The factor acts on failures too: a good retrieval in a failed rollout makes its
    penalty larger. 1 + a A_ret turns negative, and the advantage its sign, below A_ret = -1/a; a
    group of n has |A_ret| <= (n - 1) / sqrt(n), so at a = 0.2 that needs a group of 27 or more.

    Args:
        outcome_advantages: [leaves] A_acc.
        retrieval_rewards: [leaves] Z of the same group, 0 for a rollout without a graft.
        weight: a.

    Raises:
        ValueError: columns of different lengths.
    """
    outcomes = np.asarray(outcome_advantages, dtype=np.float64)
    rewards = np.asarray(retrieval_rewards, dtype=np.float64)
    if outcomes.ndim != 1 or outcomes.shape != rewards.shape:
        raise ValueError(
            f"combined_advantages: got {outcomes.size} outcome advantages and {rewards.size}"
            " retrieval rewards; expected two flat lists with one entry for each leaf of the group"
        )
    if rewards.size < 2 or (rewards == rewards[0]).all():
        return outcomes.copy()
    relative = (rewards - rewards.mean()) / (rewards.std(ddof=1) + eps)
    combined: Floats = (1.0 + weight * relative) * outcomes
    return combined


def shaping_factor(retrieved_frac: float, weight: float = 0.05) -> float:
    """Returns 1 + m F, by which the ratios of a trajectory with grafts are multiplied before
    clipping.

    r̂ = (1 + m F) · ρ        (RAPO, arXiv 2603.03078, eq. 8)

    Args:
        retrieved_frac: F, retrieved tokens over all tokens of the trajectory after its prompt, 0..1
            (the paper says "all tokens"; that the prompt is left out is our reading).
        weight: m.

    Raises:
        ValueError: a share outside 0..1.
    """
    # So written that it refuses NaN too.
    if not 0.0 <= retrieved_frac <= 1.0:
        raise ValueError(
            f"shaping_factor: retrieved_frac is {retrieved_frac}; expected a share, 0..1"
        )
    return 1.0 + weight * retrieved_frac


def graft_neighbours(steps: Sequence[Step]) -> list[tuple[Step, Step]]:
    """Returns, for each graft of a path, the policy's last step before it and its first after it.

    These are the steps whose entropies are H₋ and H₊ of RAPO (arXiv 2603.03078, eq. 5). A graft
    without one of them (the trajectory ended there) is left out.
    """
    found = []
    for index, step in enumerate(steps):
        if step.is_graft:
            before = next((s for s in reversed(steps[:index]) if s.num_sampled), None)
            after = next((s for s in steps[index + 1 :] if s.num_sampled), None)
            if before is not None and after is not None:
                found.append((before, after))
    return found


def inexact_neighbours(tree: Tree) -> set[str]:
    """Returns the ids of the steps around grafts whose entropies are of an engine's top-k tokens
    alone, which the retrieval reward (arXiv 2603.03078, eq. 5) cannot use."""
    found: set[str] = set()
    for path in tree.trajectories():
        for pair in graft_neighbours(path.steps):
            found.update(step.id for step in pair if step.entropy_kind is not EntropyKind.EXACT)
    return found


def inexact_steps(tree: Tree) -> set[str]:
    """Returns the ids of all sampled steps whose entropies are of an engine's top-k tokens.

    Ours: AEPO's z (arXiv 2510.14545) is over entropies of one kind only.
    """
    return {
        step.id
        for step in tree.steps
        if step.entropy_kind is not EntropyKind.EXACT and step.num_sampled
    }


def path_retrieval_reward(path: Trajectory, variant: RetrievalVariant = "paper") -> float:
    """Returns Z_i, the mean retrieval reward over the trajectory's grafts; 0 without one (RAPO,
    arXiv 2603.03078, eq. 5 to 7).

    A branch inherits the grafts above it. The entropies are means over the tokens the policy
    sampled in a step; tool results, which the paper's unit also contains, were not drawn from a
    distribution. They are those recorded by the engine, in bfloat16 too; the learner's only where
    the engine knew no more than its top k tokens.
    """
    rewards = []
    for pair in graft_neighbours(path.steps):
        before, after = (fmean(step.sampled_entropies) for step in pair)
        rewards.append(retrieval_reward(before, after, variant=variant))
    return fmean(rewards) if rewards else 0.0


def path_retrieved_frac(path: Trajectory) -> float:
    """Returns F_i, retrieved tokens (markup and observation included) over all tokens after the
    prompt, 0..1.

    Source: RAPO, arXiv 2603.03078, eq. 8.
    """
    # Stored steps that the rollout began below are history, as the prompt is.
    num_tokens = 0
    num_retrieved = 0
    for step in (*path.steps[1:], *path.contexts):
        if not isinstance(step.cause, StoredCause):
            # What is written again counts once.
            num_tokens += step.num_tokens - step.num_by(Origin.CONTEXT)
            num_retrieved += step.num_by(Origin.RETRIEVED)
    return num_retrieved / num_tokens if num_tokens else 0.0
