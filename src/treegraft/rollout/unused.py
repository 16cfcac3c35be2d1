"""The shares of planned branches and grafts that were never made."""

from __future__ import annotations

from collections.abc import Sequence

from treegraft.core.interfaces import Explorer
from treegraft.core.types import Origin, Tree


def unused_metrics(trees: Sequence[Tree], explorer: Explorer, num_leaves: int) -> dict[str, float]:
    """Returns branch/unused_frac and graft/unused_frac, each only where the explorer plans for
    branches or grafts.

    Args:
        num_leaves: of a tree, at most.
    """
    metrics: dict[str, float] = {}
    num_starts = explorer.starts(num_leaves).num
    if trees and num_starts < num_leaves:
        back_fill = [sum(step.depth == 1 for step in tree.steps) - num_starts for tree in trees]
        metrics["branch/unused_frac"] = sum(max(0, num) for num in back_fill) / (
            len(trees) * (num_leaves - num_starts)
        )
    paths = [path.steps for tree in trees for path in tree.trajectories()]
    hybrid = [steps for steps in paths if explorer.is_hybrid(steps[1].ordinals[1])]
    grafted = [any(step.origin is Origin.RETRIEVED for step in steps) for steps in hybrid]
    if hybrid:
        metrics["graft/unused_frac"] = grafted.count(False) / len(hybrid)
    return metrics
