"""Two symptoms that rewards show late: the likelihood of right actions falls, or what the agent
does no longer depends on the question.

Both are measured after an update by a few forward passes on its own trees. Nothing is learned from
them and no random number is drawn, so weights and trees are the same without them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from treegraft.core.demonstration import Written, tree_of_paths
from treegraft.core.interfaces import LearnerLike
from treegraft.core.types import ROOT_ID, Origin, Step, Trajectory, Tree

NUM_SUCCESSES = 8
"""Successful trajectories that are scored again, one a task."""
NUM_QUESTIONS = 6
"""Questions whose first steps are compared, each with each."""


def symptoms(
    learner: LearnerLike, trees: Sequence[Tree], *, has_own_scores: bool = True
) -> dict[str, float]:
    """Returns learn/success_logprob_change and learn/question_information of an update's trees as
    `LearnerLike.learn` has returned them, each only where there is something to measure.

    Args:
        has_own_scores: whether old log-probabilities are the learner's. Those of an engine differ
            from it without any learning, so no change is measured against them.
    """
    change = success_change(learner, trees) if has_own_scores else {}
    return change | question_information(learner, trees)


def success_change(learner: LearnerLike, trees: Sequence[Tree]) -> dict[str, float]:
    """Returns the mean change of log π(y) of the tokens that the policy sampled on successful
    trajectories, from before the update to after it, in nats a token.

    Learning from a group should raise it. That it falls first, long before the reward does, is Lazy
    Likelihood Displacement (arXiv 2512.04220), which is defined on the right answers of a group.
    The first successful trajectory of each learned tree, the first `NUM_SUCCESSES` of them, is
    scored again; the old scores are the learner's.
    """
    successes = [path for tree in trees if (path := _first_success(tree)) is not None]
    chosen = [_alone(path) for path in successes[:NUM_SUCCESSES]]
    if not chosen:
        return {}
    changes = [
        new - old
        for before, after in zip(chosen, learner.with_logprobs(chosen), strict=True)
        for step, again in zip(before.steps, after.steps, strict=True)
        if step.old_logprobs is not None and again.old_logprobs is not None
        for old, new, is_own in zip(
            step.old_logprobs, again.old_logprobs, step.sampled_mask, strict=True
        )
        if is_own
    ]
    return {"learn/success_logprob_change": fmean(changes)} if changes else {}


def question_information(learner: LearnerLike, trees: Sequence[Tree]) -> dict[str, float]:
    """Returns how much first steps say about the question they were sampled for, as a share of what
    they could say: 1 where each is likely under its own question alone, 0 where it is equally
    likely under all.

    I = 1/n Σ_i [ log π(y_i | x_i) - log 1/n Σ_j π(y_i | x_j) ] / ln n

    over n questions x, each with the first step y of its first trajectory; at most 1, and below 0
    where steps are less likely under their own questions. The mean estimates the mutual information
    of input and output by scores across a batch, after RAGEN-2 (arXiv 2604.06268), which finds it
    to fall while entropy and reward still look well. Departures: first steps alone, since later
    ones follow results that tell the question; the share of ln n, the most that n questions show.
    """
    firsts = {tree.root.token_ids: step for tree in trees if (step := _first_step(tree))}
    pairs = list(firsts.items())[:NUM_QUESTIONS]
    if len(pairs) < 2:
        return {}
    # Under each question the first steps of all of them, so that a prompt is read once.
    crossed = [
        tree_of_paths(
            trees[0].task, f"symptoms/{n}", prompt, [[_as_sampled(step)] for _, step in pairs]
        )
        for n, (prompt, _) in enumerate(pairs)
    ]
    scored = learner.with_logprobs(crossed)
    # [question j][step i]
    scores = [[math.fsum(step.old_logprobs or ()) for step in tree.steps[1:]] for tree in scored]
    gains = [row[i] - _log_mean_exp([other[i] for other in scores]) for i, row in enumerate(scores)]
    return {"learn/question_information": fmean(gains) / math.log(len(pairs))}


def _first_success(tree: Tree) -> Trajectory | None:
    """The first trajectory that counts as correct, of a tree that was learned from."""
    is_learned = any(step.old_logprobs is not None for step in tree.steps)
    paths = tree.trajectories() if is_learned else ()
    # The tokens of a stored trajectory are another agent's.
    own = (path for path in paths if not path.is_stored)
    return next((path for path in own if path.leaf.is_correct), None)


def _alone(path: Trajectory) -> Tree:
    """A trajectory as a tree of its own."""
    return Tree(task=path.task, group_id="symptoms", steps=path.steps, leaves=(path.leaf,))


def _first_step(tree: Tree) -> Step | None:
    # Of those at the prompt: below stored steps the question is not all that stands above it.
    firsts = (step for step in tree.steps if step.parent == ROOT_ID)
    return next((step for step in firsts if step.origin is Origin.POLICY), None)


def _as_sampled(step: Step) -> Written:
    """The step without its results."""
    ids = zip(step.token_ids, step.sampled_mask, strict=True)
    own = tuple(token for token, is_own in ids if is_own)
    return Written(replace(step.content, observations=()), [(own, Origin.POLICY)])


def _log_mean_exp(values: Sequence[float]) -> float:
    peak = max(values)
    return peak + math.log(fmean(math.exp(value - peak) for value in values))
