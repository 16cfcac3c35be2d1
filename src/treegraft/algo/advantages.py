"""Group-relative advantages and the weights of leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from treegraft.types import LEARNING_RULES, Leaf, Origin, Status, Tree

Floats = npt.NDArray[np.float64]


def group_advantages(rewards: Sequence[float] | Floats, *, scale: Literal["std", "none"] = "std", eps: float = 1e-6) -> Floats:
    """Returns [leaves] how much better each leaf did than its group.

    A_i = (r_i - mean r) / (std r + eps)      scale="std"   (GRPO: Shao et al., arXiv 2402.03300, sec. 4.1)
    A_i = r_i - mean r                        scale="none"  (Dr.GRPO: Liu et al., arXiv 2503.20783, sec. 3.2)

    std is the sample standard deviation (divisor n - 1), as in verl and the ARPO family. A group of one, or one whose rewards are
    all equal, has advantage 0; verl lets the raw reward of a singleton through.

    Raises:
        ValueError: an unknown scale, or a reward that is not a finite number.
    """
    if scale not in ("std", "none"):
        raise ValueError(f"group_advantages: scale is '{scale}'; expected 'std' or 'none'")
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise ValueError(f"group_advantages: got rewards {rewards!r}; expected a flat list of finite numbers")
    if values.size < 2 or (values == values[0]).all():
        return np.zeros_like(values)
    centred = values - values.mean()
    spread = float(values.std(ddof=1)) + eps if scale == "std" else 1.0
    advantages: Floats = centred / spread
    return advantages


def leaf_weights(branchings: Sequence[float], *, kind: Literal["uniform", "inverse_branching"] = "uniform") -> Floats:
    """Returns [leaves] shares of the group, which sum to 1.

    w_i = 1 / n                       uniform
    w_i ∝ 1 / Π_steps children(s)     inverse_branching, over the policy's children of each step above the leaf

    A step with c sampled children is seen c times as often by uniform weights as the policy would reach it; the inverse product
    undoes that, so the weighted sum is unbiased for the on-policy expectation (weights by the inverse of how often something is
    drawn: Horvitz & Thompson, J. Am. Stat. Assoc. 47, 1952). Uniform is the mean over the group of GRPO (arXiv 2402.03300, eq. 3).

    Args:
        branchings: [leaves] the product above, 1 where nothing branched.

    Raises:
        ValueError: an unknown kind.
    """
    if kind not in ("uniform", "inverse_branching"):
        raise ValueError(f"leaf_weights: kind is '{kind}'; expected 'uniform' or 'inverse_branching'")
    shares = 1.0 / np.asarray(branchings, dtype=np.float64)
    if kind == "uniform":
        shares = np.ones_like(shares)
    total = shares.sum()
    return shares / total if total else shares


def assign_credit(
    tree: Tree,
    *,
    advantage: Literal["grpo", "dr_grpo"] = "grpo",
    eps: float = 1e-6,
    leaf_weight: Literal["uniform", "inverse_branching"] = "uniform",
    learn_from_truncated: bool = True,
) -> Tree:
    """Returns the tree with weight, advantage and has_loss of every leaf filled in, by the status table of `types`.

    The outcome's advantage goes to the whole trajectory, as in GRPO (Shao et al., arXiv 2402.03300, sec. 4.1.2). Failed leaves
    leave the group: no advantage, weight 0, and the others' weights sum to 1 without them.
    """
    members = [leaf for leaf in tree.leaves if LEARNING_RULES[leaf.status].in_group]
    unscored = [leaf.step_id for leaf in members if leaf.reward is None]
    if unscored:
        raise ValueError(f"assign_credit: tree '{tree.group_id}': leaves {unscored} have no reward; score the tree first")
    rewards = [leaf.reward for leaf in members if leaf.reward is not None]
    advantages = group_advantages(rewards, scale="std" if advantage == "grpo" else "none", eps=eps)
    weights = leaf_weights([_branching(tree, leaf) for leaf in members], kind=leaf_weight)
    credited = {
        leaf.step_id: replace(
            leaf,
            advantage=float(a),
            weight=float(w),
            has_loss=LEARNING_RULES[leaf.status].has_loss and (learn_from_truncated or leaf.status is not Status.TRUNCATED),
        )
        for leaf, a, w in zip(members, advantages, weights, strict=True)
    }
    failed = [leaf for leaf in tree.leaves if leaf.step_id not in credited]
    credited |= {leaf.step_id: replace(leaf, advantage=None, weight=0.0, has_loss=False) for leaf in failed}
    return replace(tree, leaves=tuple(credited[leaf.step_id] for leaf in tree.leaves))


def _branching(tree: Tree, leaf: Leaf) -> float:
    """Product over the steps above the leaf of the policy's children of that step, the root's starts left out."""
    product = 1.0
    for step in tree.path(leaf.step_id)[1:-1]:
        children = [s for s in tree.steps if s.parent == step.id and s.origin is Origin.POLICY]
        product *= max(1, len(children))
    return product
