"""Independent rollouts, as in GRPO: every leaf is a start of its own."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Self

from treegraft.core.types import Branch, Expand, Generate, Graft, PathView, Retry, Start, Tree

_SAME = 1e-9
"""Rewards that differ by at most this count as equal."""


def rewards_vary(tree: Tree, *, penalty: float = 0.0) -> bool:
    """Returns whether the rewards of a scored tree differ at any place where rollouts began, so
    that its group teaches something (DAPO's dynamic sampling, arXiv 2503.14476, sec. 3.2).

    Args:
        penalty: weight of the reward "overlong", which is not counted as variance: it would let
            groups in whose answers are equally right.
    """
    first: dict[str, float] = {}
    for path in tree.trajectories():
        leaf = path.leaf
        if leaf.status.rule.in_group:
            outcome = (leaf.reward or 0.0) - penalty * leaf.reward_parts.get("overlong", 0.0)
            # Each place where rollouts began is a group of its own; the difference leaves rounding
            # errors of the penalty behind.
            if abs(outcome - first.setdefault(path.start_id, outcome)) > _SAME:
                return True
    return False


class Independent:
    """Opens all leaves at the root, never branches and never retrieves. The other explorers
    derive from it and override its decisions.

    Source: the group sampling of GRPO (Shao et al., arXiv 2402.03300, sec. 4.1). In two stages it
    is our own departure: the first n leaves are scored, and the others follow only where these
    earned different rewards, since a group whose rewards are equal teaches nothing. DAPO (arXiv
    2503.14476, sec. 3.2) draws further tasks instead, at the price of whole groups.
    """

    probe_tokens: int | None = None
    expands: bool = False
    retries: bool = False
    wants_rewards: bool = False
    has_stages: bool = False
    plans_starts: bool = True
    _num_first: int | None = None
    _fill_from: float | None = None
    _penalty = 0.0

    def in_stages(
        self, num_first: int | None, fill_from: float | None = None, penalty: float = 0.0
    ) -> Self:
        """Sets the leaves of the first stage, None for one stage, their mean reward from which the
        second follows, None for any, and the weight of the reward "overlong", whose differences do
        not count; returns the explorer."""
        self._num_first = num_first
        self._fill_from = fill_from
        self._penalty = penalty
        self.wants_rewards = self.has_stages = num_first is not None
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
        if not rewards_vary(tree, penalty=self._penalty):
            return False
        in_group = (leaf for leaf in tree.leaves if leaf.status.rule.in_group)
        return (
            self._fill_from is None
            or fmean(leaf.reward or 0.0 for leaf in in_group) >= self._fill_from
        )
