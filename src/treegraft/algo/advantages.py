"""Group-relative advantages and the weights of leaves."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from treegraft.algo.arpo import shared_advantages
from treegraft.algo.rapo import (
    RetrievalVariant,
    combined_advantages,
    path_retrieval_reward,
    path_retrieved_frac,
)
from treegraft.core.types import LEARNING_RULES, Leaf, Origin, Status, Trajectory, Tree

Floats = npt.NDArray[np.float64]


def group_advantages(
    rewards: Sequence[float] | Floats, *, scale: Literal["std", "none"] = "std", eps: float = 1e-6
) -> Floats:
    """Returns [leaves] how much better each leaf did than its group.

    A_i = (r_i - mean r) / (std r + eps)   scale="std" (GRPO)
    A_i = r_i - mean r                     scale="none" (Dr.GRPO)

    Sources: Shao et al., arXiv 2402.03300, sec. 4.1; Liu et al., arXiv 2503.20783, sec. 3.2. std is
    the sample standard deviation (divisor n - 1), as in verl and the ARPO family. A group of
    one, or one whose rewards are all equal, has advantage 0; verl lets the raw reward of a
    singleton through.

    Raises:
        ValueError: an unknown scale, or a reward that is not a finite number.
    """
    if scale not in ("std", "none"):
        raise ValueError(f"group_advantages: scale is '{scale}'; expected 'std' or 'none'")
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise ValueError(
            f"group_advantages: got rewards {rewards!r}; expected a flat list of finite numbers"
        )
    # Compared, not std == 0: rounding can leave a spread of 1e-17 where all rewards are equal, so
    # that their advantages would not be exactly 0 and the group would not be skipped.
    if values.size < 2 or (values == values[0]).all():
        return np.zeros_like(values)
    spread = float(values.std(ddof=1)) + eps if scale == "std" else 1.0
    advantages: Floats = (values - values.mean()) / spread
    return advantages


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

    Raises:
        ValueError: an unknown kind.
    """
    if kind not in ("uniform", "inverse_branching"):
        raise ValueError(
            f"leaf_weights: kind is '{kind}'; expected 'uniform' or 'inverse_branching'"
        )
    products = np.asarray(branchings, dtype=np.float64)
    shares = 1.0 / products if kind == "inverse_branching" else np.ones_like(products)
    total = shares.sum()
    return shares / total if total else shares


def assign_credit(
    tree: Tree,
    *,
    advantage: Literal["grpo", "dr_grpo"] = "grpo",
    eps: float = 1e-6,
    leaf_weight: Literal["uniform", "inverse_branching"] = "uniform",
    attribution: Literal["soft", "hard"] = "soft",
    retrieval_reward: RetrievalVariant = "paper",
    retrieval_weight: float = 0.2,
    learn_from_truncated: bool = True,
) -> Tree:
    """Returns the tree with the credit of every leaf filled in, by the status table of `types`.

    The outcome's advantage goes to the whole trajectory, as in GRPO (Shao et al., arXiv 2402.03300,
    sec. 4.1.2), times the factor of the retrieval reward (RAPO, arXiv 2603.03078, eq. 10), which is
    1 where the tree has no graft. Failed leaves leave the group: no advantage, weight 0, and the
    others' weights sum to 1 without them.

    Args:
        attribution: "soft" leaves it at that; "hard" also sets `Step.advantage` of every step that
            the policy wrote on a live trajectory to the mean over the live leaves below it (ARPO,
            arXiv 2507.19849).
        retrieval_reward: which retrieval reward (see `rapo.retrieval_reward`).
        retrieval_weight: its share a.
        learn_from_truncated: whether truncated trajectories carry loss.

    Raises:
        ValueError: a live leaf without reward, or an unknown name.
    """
    if attribution not in ("soft", "hard"):
        raise ValueError(
            f"assign_credit: attribution is '{attribution}'; expected 'soft' or 'hard'"
        )
    members = [path for path in tree.trajectories() if LEARNING_RULES[path.status].in_group]
    unscored = [path.leaf.step_id for path in members if path.reward is None]
    if unscored:
        raise ValueError(
            f"assign_credit: tree '{tree.group_id}': leaves {unscored} have no reward; score the"
            " tree first"
        )
    rewards = [path.reward for path in members if path.reward is not None]
    outcomes = group_advantages(rewards, scale="std" if advantage == "grpo" else "none", eps=eps)
    helped = [path_retrieval_reward(path, retrieval_reward) for path in members]
    advantages = combined_advantages(outcomes, helped, weight=retrieval_weight, eps=eps)
    weights = leaf_weights([_branching(tree, path.leaf) for path in members], kind=leaf_weight)
    # Every field is set anew, so that crediting a tree twice gives the same as once.
    credited = {
        leaf.step_id: replace(
            leaf,
            advantage=None,
            outcome_advantage=None,
            retrieval_reward=0.0,
            retrieved_frac=0.0,
            weight=0.0,
            has_loss=False,
        )
        for leaf in tree.leaves
    }
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
            has_loss=is_taught and LEARNING_RULES[path.status].has_loss,
        )
    shared: Sequence[float | None] = [None] * len(tree.steps)
    if attribution == "hard":
        shared = _step_advantages(tree, members, advantages)
    steps = [
        step if step.advantage == value else replace(step, advantage=value)
        for step, value in zip(tree.steps, shared, strict=True)
    ]
    return replace(tree, steps=tuple(steps), leaves=tuple(credited.values()))


def _step_advantages(
    tree: Tree, members: Sequence[Trajectory], advantages: Floats
) -> list[float | None]:
    """[steps] mean advantages; None where the policy wrote nothing or no live leaf lies below."""
    below: dict[str, list[int]] = {step.id: [] for step in tree.steps}
    for index, path in enumerate(members):
        for step in path.steps:
            below[step.id].append(index)
    means = shared_advantages(advantages, list(below.values()))
    return [
        float(mean) if below[step.id] and any(step.sampled_mask) else None
        for step, mean in zip(tree.steps, means, strict=True)
    ]


def _branching(tree: Tree, leaf: Leaf) -> float:
    """Product over the steps above the leaf of the policy's children of that step."""
    # Without the root: how many starts it has is our choice, not the policy's.
    num_children = Counter(step.parent for step in tree.steps if step.origin is Origin.POLICY)
    return math.prod(float(max(1, num_children[step.id])) for step in tree.path(leaf.step_id)[1:-1])
