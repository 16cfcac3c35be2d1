"""The credit of a tree: advantages of leaves and steps, and the weights of leaves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Literal, cast

import numpy as np

from treegraft.algo.arpo import shared_advantages
from treegraft.algo.groups import (
    Floats,
    Scale,
    by_place,
    group_advantages,
    whitened,
)
from treegraft.algo.rapo import combined_advantages, path_retrieval_reward, path_retrieved_frac
from treegraft.core.kinds import OutcomeKind
from treegraft.core.registry import loaded
from treegraft.core.types import (
    ROOT_ID,
    Leaf,
    Origin,
    RetrievalVariant,
    RetryCause,
    Status,
    StoredCause,
    Trajectory,
    Tree,
)

States = Callable[[Sequence[Trajectory]], Mapping[tuple[int, str], float]]
"""What steps have in addition to the mean of their trajectories, by (number of the trajectory, step
id)."""
_SCALES: Mapping[str, Scale] = {"grpo": "std", "dr_grpo": "none", "rloo": "leave-one-out"}


def leaf_weights(
    branchings: Sequence[float], *, kind: Literal["uniform", "inverse_branching"] = "uniform"
) -> Floats:
    """Returns [leaves] shares of the group, which sum to 1.

    w_i = 1 / n                       uniform
    w_i ∝ 1 / Π_steps children(s)     inverse_branching, over the steps above the leaf

    A step with c sampled children is seen c times as often by uniform weights as the policy would
    reach it; the inverse product undoes that, so the weighted sum is unbiased for the on-policy
    expectation (weights by the inverse of how often something is drawn: Horvitz & Thompson, J. Am.
    Stat. Assoc. 47, 1952). Uniform is the mean over the group of GRPO (arXiv 2402.03300, eq. 3).

    Args:
        branchings: [leaves] the product above, 1 where nothing branched.
    """
    products = np.asarray(branchings, dtype=np.float64)
    shares = 1.0 / products if kind == "inverse_branching" else np.ones_like(products)
    # 0 for a group whose leaves have all failed.
    total = shares.sum()
    return shares / total if total else shares


def assign_credit(
    tree: Tree,
    *,
    advantage: str | OutcomeKind = "grpo",
    outcomes: Floats | None = None,
    eps: float = 1e-6,
    leaf_weight: Literal["uniform", "inverse_branching"] = "uniform",
    attribution: Literal["soft", "hard"] | States = "soft",
    retrieval_reward: RetrievalVariant = "paper",
    retrieval_weight: float = 0.2,
    restarts: Literal["apart", "together"] = "apart",
    learn_from_truncated: bool = True,
) -> Tree:
    """Returns the tree with the credit of every leaf filled in, by the status table of `types`.

    The outcome's advantage goes to the whole trajectory, as in GRPO (Shao et al., arXiv 2402.03300,
    sec. 4.1.2), times the factor of the retrieval reward (RAPO, arXiv 2603.03078, eq. 10), which is
    1 where the tree has no graft. Failed leaves leave the group: no advantage, weight 0, and the
    others' weights sum to 1 without them.

    Args:
        advantage: how the outcome is compared: a name of the core, or an extension's; one of those
            over a whole batch needs `outcomes`.
        outcomes: [leaves in the group] advantages of the outcome, computed already; None computes
            them.
        attribution: "soft" leaves it at that; "hard" also sets `Step.advantage` of every step that
            the policy wrote on a live trajectory to the mean over the live leaves below it (ARPO,
            arXiv 2507.19849); a function to that mean plus what it returns.
        retrieval_reward: which retrieval reward (see `rapo.retrieval_reward`).
        retrieval_weight: its share a.
        restarts: rollouts that begin below stored steps are compared with those of the same place
            ("apart"), or with all of the tree.
        learn_from_truncated: whether truncated trajectories carry loss.

    Raises:
        ValueError: a live leaf without reward, or a name that compares a whole batch.
    """
    members = group_members(tree)
    if outcomes is None:
        is_apart = restarts == "apart"
        outcomes = outcome_advantages(members, advantage, eps, is_apart=is_apart)
    helped = []
    branchings = []
    for path in members:
        helped.append(path_retrieval_reward(path, retrieval_reward))
        branchings.append(_branching(tree, path.leaf))
    advantages = combined_advantages(outcomes, helped, weight=retrieval_weight, eps=eps)
    shared = attributed(tree, members, advantages, attribution)
    weights = leaf_weights(branchings, kind=leaf_weight)
    # Every field is set anew, so that crediting a tree twice gives the same as once.
    credited = {leaf.step_id: _without_credit(leaf) for leaf in tree.leaves}
    columns = zip(members, advantages, outcomes, helped, weights, strict=True)
    for path, advantage_, outcome, reward, weight in columns:
        is_taught = learn_from_truncated or path.status is not Status.TRUNCATED
        credited[path.leaf.step_id] = replace(
            path.leaf,
            advantage=float(advantage_),
            outcome_advantage=float(outcome),
            retrieval_reward=reward,
            retrieved_frac=path_retrieved_frac(path),
            weight=float(weight),
            has_loss=is_taught and path.status.rule.has_loss,
        )
    steps = list(tree.steps)
    for index, value in enumerate(shared):
        if steps[index].advantage != value:
            steps[index] = replace(steps[index], advantage=value)
    found = replace(tree, steps=tuple(steps), leaves=tuple(credited.values()))
    finish = advantage.finish if isinstance(advantage, OutcomeKind) else None
    return found if finish is None else cast(Tree, loaded(finish)(found))


def attributed(
    tree: Tree,
    members: Sequence[Trajectory],
    advantages: Floats,
    attribution: Literal["soft", "hard"] | States,
) -> Sequence[float | None]:
    """Returns [steps] `Step.advantage`, None for a trajectory's own: ARPO's soft and hard
    attribution (arXiv 2507.19849), or an extension's; see `assign_credit`.
    """
    if attribution == "soft":
        return [None] * len(tree.steps)
    if attribution == "hard":
        return _step_advantages(tree, members, advantages)
    return _step_advantages(tree, members, advantages, attribution(members))


def _without_credit(leaf: Leaf) -> Leaf:
    return replace(
        leaf,
        advantage=None,
        outcome_advantage=None,
        retrieval_reward=0.0,
        retrieved_frac=0.0,
        weight=0.0,
        has_loss=False,
    )


def group_members(tree: Tree) -> list[Trajectory]:
    """Returns the trajectories that are compared with each other, all but the failed ones: the
    group of GRPO (arXiv 2402.03300).

    Raises:
        ValueError: one of them has no reward.
    """
    members = []
    unscored = []
    for path in tree.trajectories():
        if path.status.rule.in_group:
            members.append(path)
            if path.reward is None:
                unscored.append(path.leaf.step_id)
    if unscored:
        raise ValueError(
            f"tree '{tree.group_id}': leaves {unscored} have no reward; score the tree first"
        )
    return members


def batch_outcomes(
    trees: Sequence[Tree], *, has_baseline: bool, restarts: Literal["apart", "together"] = "apart"
) -> list[Floats]:
    """Returns, for each tree, [leaves in the group] the outcome's advantages by REINFORCE++
    (arXiv 2501.03262), see `whitened`.

    Args:
        restarts: as in `assign_credit`; each group has its own baseline.
    """
    outcomes = []
    places = []
    rewards = []
    lengths = []
    for tree in trees:
        members = group_members(tree)
        outcomes.append(np.zeros(len(members)))
        starts = [path.start_id if restarts == "apart" else ROOT_ID for path in members]
        for own in by_place(starts):
            places.append((outcomes[-1], own))
            rewards.append([members[index].leaf.reward or 0.0 for index in own])
            counts = []
            for index in own:
                counts.append(sum(step.num_loss_tokens for step in members[index].steps))
            lengths.append(counts)
    values = whitened(rewards, lengths, has_baseline=has_baseline)
    for (column, own), found in zip(places, values, strict=True):
        column[own] = found
    return outcomes


def outcome_advantages(
    members: Sequence[Trajectory],
    advantage: str | OutcomeKind,
    eps: float,
    *,
    is_apart: bool = True,
) -> Floats:
    """Returns [members] the advantages of outcomes, by GRPO (arXiv 2402.03300), one of its kin, or
    an extension; see `assign_credit`.

    Raises:
        ValueError: a name that is unknown, or compares a whole batch.
    """
    # Rollouts from another place had another task before them.
    groups = by_place([path.start_id for path in members])
    if len(groups) > 1 and is_apart:
        found = np.zeros(len(members))
        for group in groups:
            ours = [members[index] for index in group]
            found[group] = outcome_advantages(ours, advantage, eps)
        return found
    if isinstance(advantage, OutcomeKind):
        compared: Floats = loaded(advantage.compare)(members, eps)
        return compared
    rewards = [path.leaf.reward or 0.0 for path in members]
    if advantage not in _SCALES:
        raise ValueError(
            f"assign_credit: advantage is '{advantage}', which compares a whole batch; expected"
            f" `outcomes` with it, or one of {', '.join(_SCALES)}"
        )
    return group_advantages(rewards, scale=_SCALES[advantage], eps=eps)


def scale_of(advantage: str) -> Scale:
    """Returns how rewards are scaled where outcomes are compared by this name: GRPO's deviation
    (arXiv 2402.03300) for names of extensions."""
    return _SCALES.get(advantage, "std")


def _step_advantages(
    tree: Tree,
    members: Sequence[Trajectory],
    advantages: Floats,
    more: Mapping[tuple[int, str], float] | None = None,
) -> list[float | None]:
    """[steps] mean advantages; None where the policy wrote nothing or no live leaf lies below.

    Args:
        more: what each step has in addition, by trajectory and step id.
    """
    below: dict[str, list[int]] = {step.id: [] for step in tree.steps}
    for index, path in enumerate(members):
        for step in path.steps:
            below[step.id].append(index)
    means = shared_advantages(advantages, list(below.values()))
    found: list[float | None] = []
    for step, mean in zip(tree.steps, means, strict=True):
        owners = below[step.id]
        if not owners or not step.num_sampled:
            found.append(None)
        elif more and (owners[0], step.id) in more:
            found.append(float(mean) + fmean(more[index, step.id] for index in owners))
        else:
            found.append(float(mean))
    return found


def _branching(tree: Tree, leaf: Leaf) -> float:
    """Product over the steps above the leaf of the policy's children of that step."""
    # Without the root, stored steps and retries: how many rollouts begin there is our choice, not
    # the policy's.
    num_children: Counter[str | None] = Counter()
    for step in tree.steps:
        if step.origin is Origin.POLICY and not isinstance(step.cause, RetryCause):
            num_children[step.before] += 1
    product = 1.0
    for step in tree.path(leaf.step_id)[1:-1]:
        if not isinstance(step.cause, StoredCause):
            product *= max(1, num_children[step.id])
    return product
