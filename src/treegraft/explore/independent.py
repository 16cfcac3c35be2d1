"""Independent rollouts, as in GRPO: every leaf is a start of its own."""

from __future__ import annotations

from collections.abc import Sequence

from treegraft.core.types import Branch, Expand, Generate, Graft, PathView, Start, Tree


class Independent:
    """Opens all leaves at the root, never branches and never retrieves; the other explorers
    override the decisions that they make otherwise.

    Source: the group sampling of GRPO (Shao et al., arXiv 2402.03300, sec. 4.1).
    """

    probe_tokens: int | None = None
    expands = False

    def starts(self, max_leaves: int) -> Start:
        """Returns `max_leaves` starts."""
        return Start(max_leaves)

    def is_hybrid(self, start: int) -> bool:
        """Returns False, always."""
        return False

    def before_step(self, path: PathView) -> Generate | Graft:
        """Returns Generate, always."""
        return Generate()

    def after_probe(self, path: PathView, probe: Sequence[float]) -> Branch | None:
        """Returns None, always."""
        return None

    def fill(self, tree: Tree, max_leaves: int) -> Start | Sequence[Expand]:
        """Returns the leaves that are still missing, all at once: none of them can branch any
        more, so every group has equally many leaves."""
        return Start(max_leaves - len(tree.leaves))
