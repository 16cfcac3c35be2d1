"""Commit branching: where every rollout failed, answers are begun in place of calls and calls in
place of answers, deeper and deeper, until one succeeds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from statistics import fmean

from treegraft.core.types import (
    LEARNING_RULES,
    Origin,
    Retry,
    RetryCause,
    Start,
    Step,
    Trajectory,
    Tree,
)
from treegraft.explore.independent import Independent
from treegraft.settings.explore import CommitSettings

RULE = "commit"


class CommitBranching(Independent):
    """Opens a few first-level rollouts; where all of them failed, what the agent did not do is
    tried on the rollout with the most tool calls, round after round until one succeeds or the
    leaves are used up: first an answer after each of its results that has none, which costs no
    call, then a call in place of the answer at its end.

    Whether an agent answers or goes on is decided by the token that opens the one or the other. An
    agent that goes on with probability p needs p^-n rollouts for n such choices in a row; here they
    take n rounds. With `credit.restarts = "together"` all leaves are compared, so that the choices
    that failed lose probability; with `loss.graft_coef` > 0 the openings on trajectories that beat
    their group are imitated (see `losses.lesson_loss`): no policy gradient, since nobody sampled
    them.

    Ours, not of a paper. It differs from AXPO (arXiv 2605.28774, see `Axpo`) in its places
    (answers, and calls too many), in its rounds, and in what is learned.
    """

    expands = True
    retries = True
    wants_rewards = True

    def __init__(self, settings: CommitSettings) -> None:
        self._settings = settings
        self.begins_answers = settings.answers

    def starts(self, max_leaves: int) -> Start:
        """Returns the first-level rollouts, or as many as there are leaves."""
        return Start(min(self._settings.num_starts, max_leaves))

    def fill(self, tree: Tree, max_leaves: int) -> Start | Sequence[Retry]:
        """Returns the next round where every rollout has failed; `num_more` leaves at the prompt,
        once, where only some of the first ones have; nothing after a success otherwise."""
        own, paths = self._settings, tree.trajectories()
        members = [path for path in paths if LEARNING_RULES[path.status].in_group]
        succeeded = [(path.reward or 0.0) >= own.min_reward for path in members]
        num_left = max_leaves - len(tree.leaves)
        if any(succeeded):
            has_more = len(tree.leaves) > own.num_starts or any(path.is_retry for path in members)
            return Start(0 if has_more or all(succeeded) else min(own.num_more, num_left))
        if num_left < 1:
            return Start(0)
        tried = {step.cause.beside for step in tree.steps if isinstance(step.cause, RetryCause)}
        return self._stops(members, tried, num_left) or self._calls(members, tried, num_left)

    def _stops(
        self, members: Sequence[Trajectory], tried: set[str], num_left: int
    ) -> Sequence[Retry]:
        """Answers in place of the calls of the rollout with the most, the last call first."""
        if not members or not self._settings.answers:
            return []
        answered = {path.steps[-1].parent for path in members if _has_answered(path)}
        longest = min(members, key=lambda path: (-path.num_tool_calls, path.steps[-1].ordinals))
        # Below the prompt nothing is known yet.
        steps = [
            step
            for step in longest.steps[2:]
            if step.content.observations
            and _is_own(step)
            and step.parent not in answered
            and step.id not in tried
        ]
        found = [Retry(one.id, 1, RULE, opens="answer", is_lesson=True) for one in steps[::-1]]
        return found[:num_left]

    def _calls(
        self, members: Sequence[Trajectory], tried: set[str], num_left: int
    ) -> Start | Sequence[Retry]:
        """Calls in place of the answer that came after the most calls."""
        own = self._settings
        ends = [(path.num_tool_calls, path.steps[-1]) for path in members if _has_answered(path)]
        places = [(calls, step) for calls, step in ends if _is_own(step) and step.id not in tried]
        if not places:
            return Start(0)
        # Equal ones by their place in the tree.
        _, step = min(places, key=lambda one: (-one[0], -_uncertainty(one[1]), one[1].ordinals))
        return [
            Retry(step.id, min(own.num_retries, num_left), RULE, own.tool or None, is_lesson=True)
        ]


def _has_answered(path: Trajectory) -> bool:
    return path.steps[-1].content.answer is not None


def _is_own(step: Step) -> bool:
    """Whether the policy wrote it, in its format."""
    return step.origin is Origin.POLICY and not step.violation


def _uncertainty(step: Step) -> float:
    return fmean(compress(step.entropies, step.sampled_mask))
