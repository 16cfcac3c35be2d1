"""Entropies of trees that rank 0 alone has, with the help of the other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from treegraft.algo.rapo import inexact_neighbours
from treegraft.core.interfaces import LearnerLike
from treegraft.core.team import Team
from treegraft.core.types import Tree


class Measuring:
    """A learner's entropies on rank 0: trees go to the other ranks first, which make their part of
    the passes in `follow`."""

    def __init__(self, learner: LearnerLike, team: Team) -> None:
        self._learner = learner
        self._team = team

    def with_exact_entropies(
        self, trees: Sequence[Tree], *, everywhere: bool = False
    ) -> list[Tree]:
        """Returns the trees with exact entropies, as `Learner.with_exact_entropies`."""
        # Mostly there are none, and whole trees need not travel.
        if not any(map(inexact_neighbours, trees)):
            return list(trees)
        self._team.share(everywhere)
        own = self._team.share_trees(trees)
        return self._learner.with_exact_entropies(own, everywhere=everywhere)


@contextmanager
def measuring(learner: LearnerLike, team: Team) -> Iterator[Measuring]:
    """The measurements of a block on rank 0, while the other ranks `follow`."""
    yield Measuring(learner, team)
    team.share(None)


def follow(learner: LearnerLike, team: Team) -> None:
    """Makes this rank's part of what rank 0 measures, until the end of its block."""
    while (everywhere := team.share()) is not None:
        learner.with_exact_entropies(team.share_trees(), everywhere=everywhere)
