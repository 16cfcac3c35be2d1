"""APPO's mathematics: credit of branches for the steps above them, weights by what comes after."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from treegraft import Origin, Trajectory, Tree
from treegraft.parts import BranchCause, Leaf

Floats = npt.NDArray[np.float64]

RATIO_LIMIT = 6.0
"""Ratio above which a negative advantage is not raised any further."""
LOG_RATIO_LIMIT = 20.0
"""Log-ratios are cut at ± this before they are added up."""


def is_branch(path: Trajectory) -> bool:
    """Returns whether a trajectory left another one: it holds the first step of a branch (APPO's
    branch rollouts, arXiv 2606.12384)."""
    return any(isinstance(step.cause, BranchCause) for step in path.steps)


def advantages_apart(rewards: Sequence[float], branches: Sequence[bool], *, eps: float) -> Floats:
    """Returns [leaves] the advantages of rollouts from the prompt and of branches, each among their
    own.

    A_i = (r_i - mean r) / (std r + eps), with the population standard deviation (divisor n)

    Source: APPO, arXiv 2606.12384, where one group for both costs 2.1 points. A group of one, or of
    equal rewards, has advantage 0.

    Args:
        branches: [leaves] whether each is a branch.
    """
    values = np.asarray(rewards, np.float64)
    kinds = np.asarray(branches, bool)
    advantages = np.zeros_like(values)
    for kind in (False, True):
        group = values[kinds == kind]
        if group.size and not (group == group[0]).all():
            advantages[kinds == kind] = (group - group.mean()) / (group.std() + eps)
    return advantages


def with_prefix_credit(tree: Tree) -> Tree:
    """Returns a credited tree whose branches teach the steps above them and nothing else.

    A(step) = A_i + mean A of the branches that left rollout i at this step or below it

    Source: APPO, arXiv 2606.12384, released code: branches carry no loss and leave the
    denominators; a token of a rollout gains the mean advantage of all branches that began behind
    it, each counted once.

    Assumed here, as a branch leaves at a step's border: the last shared step gains too, as the
    token of the split does in the code. A branch of a branch, which the code does not make, counts
    for the rollout that both left. A branch that failed for a reason of ours counts for nothing.
    The code also multiplies rewards by a factor that is 1 from the last split on, where an
    outcome's reward stands; it changes nothing and is not here.
    """
    paths = tree.trajectories()
    rollouts = [path for path in paths if not is_branch(path)]
    begun = _begun(paths)
    total = sum(path.leaf.weight for path in rollouts)
    advantages: dict[str, float] = {}
    for path in rollouts:
        # From the end up: a split teaches all that stands above it.
        behind: list[float] = []
        for step in reversed(path.steps[1:]):
            behind += begun.get(step.id, ())
            if behind and path.leaf.advantage is not None and step.origin is Origin.POLICY:
                advantages[step.id] = path.leaf.advantage + sum(behind) / len(behind)
    names = {path.leaf.step_id for path in rollouts}

    def taught(leaf: Leaf) -> Leaf:
        if leaf.step_id not in names:
            return replace(leaf, weight=0.0, has_loss=False)
        return replace(leaf, weight=leaf.weight / total if total else 0.0)

    return replace(
        tree,
        steps=tuple(replace(one, advantage=advantages.get(one.id)) for one in tree.steps),
        leaves=tuple(map(taught, tree.leaves)),
    )


def _begun(paths: Sequence[Trajectory]) -> dict[str, list[float]]:
    """The advantages of the branches that left a rollout, by the last step that they share."""
    found: dict[str, list[float]] = {}
    for path in paths:
        # The first one: above it stands the rollout that starts at the prompt.
        first = next((step for step in path.steps if isinstance(step.cause, BranchCause)), None)
        if first is not None and first.before is not None and path.leaf.advantage is not None:
            found.setdefault(first.before, []).append(path.leaf.advantage)
    return found


def future_weights(
    log_ratios: Sequence[float],
    owners: Sequence[int],
    advantages: Sequence[float],
    positions: Sequence[int],
    *,
    weight: float,
    half_life: float,
    highest: float,
    limit: float | None,
) -> list[float]:
    """Returns [C] the factors of the advantages by how the policy has moved on what comes after.

    1 + b f_t,   f_t = clip(exp(Σ_{k≥t, ρ_k≤c} γ^(k-t) log ρ_k), 1, f_max),   γ = 2^(-1 / half-life)
    f_t = 1 at most where A < 0 and ρ_t > 6
    0 for all of a trajectory of which two tokens or more have A < 0 and ρ_t > c

    Source: APPO, arXiv 2606.12384, released code, after FIPO (arXiv 2603.19835): b = 1, a half-life
    of 64 tokens, f_max = 1.2, c = 3 of dual clip. The sum begins with the token itself and runs
    over loss tokens; distances k - t count all tokens of the path, tool results among them. So
    factors lie in 1 + b .. 1 + 1.2 b, and where all ratios are 1, as in the first optimiser step,
    every factor is 1 + b: a larger learning rate, which a comparison with another method has to
    allow for.

    Assumed: a trajectory that is left out still counts in the denominator, which the code shrinks
    within its micro-batch, so that its loss depends on the packing; without dual clip no ratio is
    left out and no trajectory either, since the code has no such mode; the KL term is not weighted,
    as in the code.

    Args:
        log_ratios: [C] log ρ of loss tokens, trajectory after trajectory, each in order; cut at
            ± 20, as in the code.
        owners: [C] the trajectory of each.
        positions: [C] tokens before each on its path.
        weight: b.
        half_life: in tokens.
        highest: f_max.
        limit: c; None for none.
    """
    gaps = [min(max(gap, -LOG_RATIO_LIMIT), LOG_RATIO_LIMIT) for gap in log_ratios]
    far = [limit is not None and gap > math.log(limit) for gap in gaps]
    lost = Counter(
        owner
        for owner, is_far, advantage in zip(owners, far, advantages, strict=True)
        if is_far and advantage < 0
    )
    found = [0.0] * len(gaps)
    total = 0.0
    for place in reversed(range(len(gaps))):
        behind = place + 1
        if behind < len(gaps) and owners[behind] == owners[place]:
            total *= 0.5 ** ((positions[behind] - positions[place]) / half_life)
        else:
            total = 0.0
        total += 0.0 if far[place] else gaps[place]
        # exp overflows past 700; the clip would cut far earlier.
        factor = min(max(math.exp(min(total, 50.0)), 1.0), highest)
        if advantages[place] < 0 and gaps[place] > math.log(RATIO_LIMIT):
            factor = 1.0
        found[place] = 0.0 if lost[owners[place]] > 1 else 1.0 + weight * factor
    return found


def peaks(entropies: Sequence[Sequence[float]]) -> list[float]:
    """Returns, for each step of a rollout, the largest standardised entropy of its tokens.

    z_t = (H_t - mean H) / std H, over all tokens of the rollout

    Source: APPO, arXiv 2606.12384, whose branch score is z(H_t) · z(Ω_t), Ω_t the ratio of the
    learner's policy to the one that sampled, over what follows. Assumed: Ω is left out, since in
    synchronous training both are the same policy, so that the code's z(Ω) standardises the rounding
    between its engine and its learner; z(H) alone is what the code's engine falls back to. The
    code also passes over tokens of white space, and counts top-10 entropies for exact ones.

    Args:
        entropies: for each step those of its sampled tokens, in nats; a step without any has -inf.
    """
    every = np.asarray([one for step in entropies for one in step], np.float64)
    spread = float(every.std()) if every.size else 0.0
    mean = float(every.mean()) if every.size else 0.0
    return [
        (max(step) - mean) / spread if step and spread else 0.0 if step else float("-inf")
        for step in entropies
    ]


def compared(members: Sequence[Trajectory], eps: float) -> Floats:
    """Returns [members] `advantages_apart` of their rewards."""
    rewards = [path.leaf.reward or 0.0 for path in members]
    return advantages_apart(rewards, [is_branch(path) for path in members], eps=eps)
