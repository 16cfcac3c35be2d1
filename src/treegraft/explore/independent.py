"""Independent rollouts, as in GRPO: every leaf is a start of its own."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Self

from treegraft.core.types import (
    LEARNING_RULES,
    Branch,
    Expand,
    Generate,
    Graft,
    PathView,
    Retry,
    Start,
    Tree,
)


class Independent:
    """Opens all leaves at the root, never branches and never retrieves; the other explorers
    override the decisions that they make otherwise.

    Source: the group sampling of GRPO (Shao et al., arXiv 2402.03300, sec. 4.1). In two stages it
    is our own departure: the first n leaves are scored, and the others follow only where these
    earned different rewards, since a group whose rewards are equal teaches nothing. DAPO (arXiv
    2503.14476, sec. 3.2) draws further tasks instead, at the price of whole groups.
    """

    probe_tokens: int | None = None
    expands = False
    wants_rewards = False
    _num_first: int | None = None
    _fill_from: float | None = None

    def in_stages(self, num_first: int | None, fill_from: float | None = None) -> Self:
        """Sets the leaves of the first stage, None for one stage, and their mean reward from which
        the second follows, None for any; returns the explorer."""
        self._num_first, self._fill_from = num_first, fill_from
        self.wants_rewards = num_first is not None
        return self

    def starts(self, max_leaves: int) -> Start:
        """Returns `max_leaves` starts, or those of the first stage."""
        return Start(min(max_leaves, self._num_first or max_leaves))

    def is_hybrid(self, start: int) -> bool:
        """Returns False, always."""
        return False

    def before_step(self, path: PathView) -> Generate | Graft:
        """Returns Generate, always."""
        return Generate()

    def after_probe(self, path: PathView, probe: Sequence[float]) -> Branch | None:
        """Returns None, always."""
        return None

    def fill(self, tree: Tree, max_leaves: int) -> Start | Sequence[Expand | Retry]:
        """Returns the leaves that are still missing, all at once: none of them can branch any
        more, so every group has equally many leaves. After a first stage whose rewards are equal,
        or too low, it returns none."""
        if self._num_first is not None and not self._is_worth_more(tree):
            return Start(0)
        return Start(max_leaves - len(tree.leaves))

    def _is_worth_more(self, tree: Tree) -> bool:
        rewards = [
            leaf.reward
            for leaf in tree.leaves
            if leaf.reward is not None and LEARNING_RULES[leaf.status].in_group
        ]
        if len(set(rewards)) < 2:
            return False
        return self._fill_from is None or fmean(rewards) >= self._fill_from
