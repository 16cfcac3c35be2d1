"""APPO: finished rollouts branch where they were least sure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress

from treegraft import Origin, Trajectory, Tree
from treegraft.extras.methods.appo_math import (
    advantages_apart,
    is_branch,
    peaks,
    with_prefix_credit,
)
from treegraft.extras.methods.leaves import half_the_leaves
from treegraft.parts import (
    BranchCause,
    Expand,
    ExplorerKind,
    Floats,
    Independent,
    OutcomeKind,
    Plugin,
    Settings,
    Start,
    has,
    setting,
    when,
)


class PeaksSettings(Settings):
    num_starts: int = setting(8, ge=1, default_of=half_the_leaves)
    """First-level rollouts, at most explore.num_leaves, of which half is the default; the rest are
    branches."""


class _Tables(Settings):
    entropy_peaks: PeaksSettings = setting(
        PeaksSettings(), idle_unless=has("explore.explorers", "entropy_peaks")
    )
    """Branches of finished rollouts at their most uncertain steps (APPO, arXiv 2606.12384)."""


class _LossFields(Settings):
    future_weight: float = setting(0.0, ge=0)
    """Raises advantages by how much likelier the policy has made what follows the token (APPO's b,
    1 in its code): each is multiplied by 1 + this times a factor from 1 to future_highest; 0 for
    none."""
    future_half_life: float = setting(64.0, gt=0, idle_unless=when("loss.future_weight"))
    """Loss tokens after which what follows counts half."""
    future_highest: float = setting(1.2, ge=1, idle_unless=when("loss.future_weight"))
    """Largest such factor."""


class EntropyPeaks(Independent):
    """Opens first-level rollouts; when all have ended, the steps with the highest peaks of entropy
    get a sibling each, over all rollouts of the task.

    Source: APPO, arXiv 2606.12384: 8 rollouts and 8 branches. Departures: a branch begins at a
    step's border and not within it, so the step of the peak is sampled anew as a whole; first steps
    get no sibling, which would be a rollout of its own; the score is the entropy's alone, see
    `appo_math.peaks`. Where fewer steps qualify than leaves are left, the rest become fresh
    rollouts.
    """

    expands = True

    def __init__(self, settings: PeaksSettings) -> None:
        self._settings = settings

    def starts(self, max_leaves: int) -> Start:
        """Returns the first-level rollouts, or as many as there are leaves."""
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
        values = [list(compress(step.entropies, step.sampled_mask)) for step in steps]
        for score, step in zip(peaks(values)[1:], steps[1:], strict=True):
            above = next(one for one in path.steps if one.id == step.parent)
            if above.origin is Origin.POLICY and any(step.sampled_mask):
                yield score, above.id


def _compared(members: Sequence[Trajectory], eps: float) -> Floats:
    rewards = [path.leaf.reward or 0.0 for path in members]
    return advantages_apart(rewards, [is_branch(path) for path in members], eps=eps)


plugin = Plugin(
    name="appo",
    explorers={
        "entropy_peaks": ExplorerKind(
            make=lambda explore, facts: EntropyPeaks(explore.entropy_peaks),
            title="APPO",
            leads=True,
            leaves="explore.entropy_peaks.num_starts",
            opens_at_once=True,
            branches=True,
        )
    },
    outcomes={
        "appo": OutcomeKind(compare=_compared, finish=with_prefix_credit, attributions=("soft",))
    },
    factors={"future_weight": "treegraft.extras.methods.appo_loss:future_factors"},
    settings={"explore": _Tables, "loss": _LossFields},
)
