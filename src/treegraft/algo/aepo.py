"""AEPO's mathematics: advantages that grow with a token's entropy, and where a tree branches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from treegraft.algo.groups import Floats
from treegraft.core.types import Tree, ids_to


def standardised(values: Floats, counts: Floats) -> Floats:
    """Returns [values] (x - μ) / σ, with the mean and the population standard deviation over values
    that occur `counts` times each; 0 where they do not spread.

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
    nothing is differentiated. Mean and standard deviation run over all loss tokens of the given
    trees, once for each trajectory that learns from the token. The released code takes them over
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
        below = dict.fromkeys((step.id for step in tree.steps), 0)
        for leaf in tree.leaves:
            for name in ids_to(leaf.step_id) if leaf.has_loss else ():
                below[name] += 1
        for step in tree.steps:
            values += step.entropies
            counts += (below[step.id] if carries else 0 for carries in step.loss_mask)
    scores = standardised(np.asarray(values, np.float64), np.asarray(counts, np.float64))
    factors = iter(np.maximum(0.0, 1.0 + weight * scores).tolist())
    found = []
    for tree in trees:
        steps = []
        for step in tree.steps:
            own = [next(factors) for _ in step.token_ids]
            carried = tuple(
                factor if carries else 1.0
                for factor, carries in zip(own, step.loss_mask, strict=True)
            )
            # None where every factor is 1: nothing to record.
            column = carried if any(one != 1.0 for one in carried) else None
            steps.append(replace(step, credit_factors=column))
        found.append(replace(tree, steps=tuple(steps)))
    return found
