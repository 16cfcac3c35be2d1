"""Independent rollouts, as in GRPO: every leaf is a start of its own."""

from __future__ import annotations

from treegraft.types import Tree


class Independent:
    """Opens all leaves at the root and never branches.

    Source: the group sampling of GRPO (Shao et al., arXiv 2402.03300, sec. 4.1).
    """

    def starts(self, max_leaves: int) -> int:
        """Returns `max_leaves`."""
        return max_leaves

    def fill(self, tree: Tree, max_leaves: int) -> int:
        """Returns the leaves that are still missing."""
        return max_leaves - len(tree.leaves)
