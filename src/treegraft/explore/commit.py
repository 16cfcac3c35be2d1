"""Commit branching: where every rollout failed, a tool call is begun in place of an answer, deeper
and deeper, and what led to a success is learned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    """Opens a few first-level rollouts; where all of them failed, the step that answered after the
    most tool calls is tried again with the opening of a call in place of its answer, round after
    round until a rollout succeeds or the leaves are used up.

    A choice between answering and going on is made by the token that opens an answer or a call. An
    agent that goes on with probability p needs p^-n rollouts for n such choices in a row; here they
    take n rounds. With `credit.restarts = "together"` all leaves are compared, so that the answers
    that failed lose probability; with `loss.graft_coef` > 0 the openings on trajectories that beat
    their group are imitated (see `losses.lesson_loss`): no policy gradient, since nobody sampled
    them.

    Ours, not of a paper. It differs from AXPO (arXiv 2605.28774, see `Axpo`) in its places
    (answers, not calls), in its rounds, and in what is learned.
    """

    expands = True
    retries = True
    wants_rewards = True

    def __init__(self, settings: CommitSettings) -> None:
        self._settings = settings

    def starts(self, max_leaves: int) -> Start:
        """Returns the first-level rollouts, or as many as there are leaves."""
        return Start(min(self._settings.num_starts, max_leaves))

    def fill(self, tree: Tree, max_leaves: int) -> Start | Sequence[Retry]:
        """Returns one more place to go on at where every rollout has failed; the other leaves, at
        the prompt, where only some have; nothing once a retry or every rollout has succeeded."""
        own, paths = self._settings, tree.trajectories()
        members = [path for path in paths if LEARNING_RULES[path.status].in_group]
        succeeded = [(path.reward or 0.0) >= own.min_reward for path in members]
        num_left = max_leaves - len(tree.leaves)
        if any(succeeded):
            is_mixed = not all(succeeded) and not any(path.is_retry for path in members)
            return Start(num_left if is_mixed else 0)
        tried = {step.cause.beside for step in tree.steps if isinstance(step.cause, RetryCause)}
        places = [
            (path.num_tool_calls, _uncertainty(step), step)
            for path in members
            for step in _answers(path)
            if step.id not in tried
        ]
        if not places or num_left < 1:
            return Start(0)
        # Equal ones by their place in the tree.
        step = min(places, key=lambda one: (-one[0], -one[1], one[2].ordinals))[2]
        num = min(own.num_retries, num_left)
        return [Retry(step.id, num, RULE, own.tool or None, is_lesson=True)]


def _answers(path: Trajectory) -> Iterator[Step]:
    """The step with the answer, where the agent wrote it below a result or the prompt."""
    step = path.steps[-1]
    if step.content.answer is not None and step.origin is Origin.POLICY and not step.violation:
        yield step


def _uncertainty(step: Step) -> float:
    return fmean(compress(step.entropies, step.sampled_mask))
