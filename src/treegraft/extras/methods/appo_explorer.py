"""APPO: finished rollouts branch where they were least sure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from treegraft import Origin, Tree
from treegraft.extras.methods.appo import PeaksSettings
from treegraft.extras.methods.appo_math import (
    is_branch,
    peaks,
)
from treegraft.parts import BranchCause, Expand, ExplorerFacts, Independent, Start


class EntropyPeaks(Independent):
    """Opens first-level rollouts; when all have ended, the steps with the highest peaks of entropy
    get a sibling each, over all rollouts of the task.

    Source: APPO, arXiv 2606.12384: 8 rollouts and 8 branches, at the tokens with the highest scores
    over all rollouts of a prompt. Departures: a branch begins at a step's border and not within it,
    so the step of the peak is sampled anew as a whole, once, however many of its tokens score high;
    first steps get no sibling, which would be a rollout of its own; the score is the entropy's
    alone, see `appo_math.peaks`. Where fewer steps qualify than leaves are left, the rest become
    fresh rollouts; the code takes the best tokens that are left, or one token several times.
    """

    expands = True

    def __init__(self, settings: PeaksSettings) -> None:
        self._settings = settings

    def starts(self, max_leaves: int) -> Start:
        """Returns the first-level rollouts, at most `max_leaves`."""
        return Start(min(self._settings.num_starts, max_leaves))

    def fill(self, tree: Tree, max_leaves: int) -> Start | Sequence[Expand]:
        """Returns the branches at the highest peaks; at the next call what is still missing."""
        missing = max_leaves - len(tree.leaves)
        has_branches = any(map(is_branch, tree.trajectories()))
        # Equal peaks by their place in the tree.
        ranked = [] if has_branches else sorted(_scored(tree), key=lambda one: -one[0])
        if missing <= 0 or not ranked:
            return Start(missing)
        return [
            Expand(
                step_id, 1, BranchCause(entropy_change=score, probability=1.0, rule="entropy_peaks")
            )
            for score, step_id in ranked[:missing]
        ]


def _scored(tree: Tree) -> Iterator[tuple[float, str]]:
    """The peak of each step that follows a result, with the step above it."""
    for path in tree.trajectories():
        steps = [step for step in path.steps[1:] if step.origin is Origin.POLICY]
        values = [step.sampled_entropies for step in steps]
        above_of = {step.id: above for above, step in pairwise(path.steps)}
        for score, step in zip(peaks(values)[1:], steps[1:], strict=True):
            above = above_of[step.id]
            if above.origin is Origin.POLICY and step.num_sampled:
                yield score, above.id


def entropy_peaks(explore: Any, facts: ExplorerFacts) -> EntropyPeaks:
    """Returns the explorer of a table [explore]."""
    return EntropyPeaks(explore.entropy_peaks)
