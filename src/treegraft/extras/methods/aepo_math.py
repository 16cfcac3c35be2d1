"""AEPO's mathematics: advantages that grow with a token's entropy, and where a tree branches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from treegraft import Tree

Floats = npt.NDArray[np.float64]


def standardised(values: Floats, counts: Floats) -> Floats:
    """Returns [values] (x - μ) / σ, with the mean and the population standard deviation over values
    that occur `counts` times each; 0 where they do not spread (the z of AEPO, arXiv 2510.14545).

    Args:
        counts: [values] 0 or more; those with 0 get a number and count for nothing.
    """
    seen = values[counts > 0]
    # Compared, as in `group_advantages`: rounding alone can leave a spread.
    if not seen.size or (seen == seen[0]).all():
        return np.zeros_like(values)
    # fsum rounds once, so the order of the trees changes nothing.
    total = math.fsum(counts)
    mean = math.fsum(counts * values) / total
    spread = math.sqrt(math.fsum(counts * (values - mean) ** 2) / total)
    scores: Floats = (values - mean) / spread
    return scores


def with_entropy_factors(trees: Sequence[Tree], *, weight: float) -> list[Tree]:
    """Returns credited trees whose `Step.credit_factors` raise the advantage of uncertain tokens.

    A_{i,t} = A_i · max(0, 1 + a z(H_t))        z(H) = (H - mean H) / std H

    Source: Dong et al., AEPO, arXiv 2510.14545 (entropy-aware advantage), a = 0.2 in its code. H_t
    is the entropy of the distribution that token t was drawn from, as the engine recorded it, so
    nothing is differentiated. Mean and standard deviation run over all loss tokens of these
    trees, once for each trajectory that learns from the token. The released code has those of
    the micro-batch instead, so its advantages depend on the packing, and its entropies from the
    learner's pass, which it makes only with an entropy bonus: with its default settings the term is
    silently off. It does not cut at 0, which z < -1/a would pass.

    Args:
        trees: an update's, after `assign_credit`.
        weight: a.
    """
    values: list[float] = []
    counts: list[float] = []
    for tree in trees:
        # A shared token weighs as often as trajectories learn from it, as if they were apart.
        below = dict.fromkeys((step.id for step in tree.steps), 0)
        for path in tree.trajectories():
            for step in path.steps if path.leaf.has_loss else ():
                below[step.id] += 1
        for step in tree.steps:
            values += step.entropies.tolist()
            counts += (below[step.id] * step.loss_mask).tolist()
    scores = standardised(np.asarray(values, np.float64), np.asarray(counts, np.float64))
    # Below 0 a factor would turn a good token's advantage into a penalty.
    factors = np.maximum(0.0, 1.0 + weight * scores)
    found = []
    place = 0
    for tree in trees:
        steps = []
        for step in tree.steps:
            own = factors[place : place + step.num_tokens]
            place += step.num_tokens
            column = np.where(step.loss_mask, own, 1.0)
            # None where every factor is 1: nothing to record.
            is_recorded = bool((column != 1.0).any())
            steps.append(replace(step, credit_factors=column if is_recorded else None))
        found.append(replace(tree, steps=tuple(steps)))
    return found


def num_global_rollouts(changes: Sequence[float], num_leaves: int, *, weight: float) -> int:
    """Returns how many of a tree's leaves start at the prompt, 1..num_leaves; the others are
    branches.

    m = k σ(β (H_root - mean H_tool)) = k σ(-β mean ΔH)        cut to int(.) + 1, at most k

    Source: Dong et al., AEPO, arXiv 2510.14545 (dynamic rollout budget), cut as in its code. The
    paper compares the question's entropy with that after tool results, both of one probe rollout;
    here each step after a result is compared token by token with the probe's first step, as ARPO
    does, and the first step is none of them, as it is in the code.

    Args:
        changes: ΔH of each step of the probe that follows a result; without any, nothing could be
            branched, and all leaves start at the prompt.
        num_leaves: k.
        weight: β.
    """
    if not changes:
        return num_leaves
    rise = weight * math.fsum(changes) / len(changes)
    # Past ± 700 exp overflows; the share is then 0 or 1 to the last digit.
    share = 1.0 / (1.0 + math.exp(min(max(rise, -700.0), 700.0)))
    return min(int(num_leaves * share) + 1, num_leaves)


def damping(num_in_a_row: int, penalty: float) -> float:
    """Returns max(0, 1 - γ' l), which makes branches in a row less likely (AEPO, arXiv 2510.14545,
    branch penalty).

    Args:
        num_in_a_row: l, the path's latest steps that all asked for a branch.
        penalty: γ', 0.05 in its code.
    """
    return max(0.0, 1.0 - penalty * num_in_a_row)


def coin_probability(change: float, weight: float, threshold: float, damped: float) -> float:
    """Returns the probability of a branch by AEPO's released code, 0..1.

    branch where (U + γ ΔH) · D ≥ τ, U uniform:   P = clip(1 - τ / D + γ ΔH, 0, 1),  0 for D = 0

    (arXiv 2510.14545, code; with τ = 0.5 it is ARPO's coin for D = 1. The code clips the score
    before it compares, which changes nothing.)

    Args:
        damped: D of `damping`.
    """
    if damped <= 0.0:
        return 0.0
    return min(1.0, max(0.0, 1.0 - threshold / damped + weight * change))
