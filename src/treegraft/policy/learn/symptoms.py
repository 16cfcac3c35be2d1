"""Three symptoms that rewards show late: the likelihood of right actions falls, what the agent does
no longer depends on the question, or the tokens that open calls and answers lose probability.

All are measured after an update by a few forward passes on its own trees. Nothing is learned from
them and no random number is drawn, so weights and trees are the same without them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from statistics import fmean

from treegraft.core.demonstration import Written, plain_step, tree_of_paths
from treegraft.core.interfaces import AnswerOpening, Format, LogprobScorer, Opening
from treegraft.core.types import ROOT_ID, Origin, Step, StepContent, Trajectory, Tree

NUM_SUCCESSES = 8
"""Successful trajectories that are scored again, one a task."""
NUM_QUESTIONS = 6
"""Questions whose first steps are compared, each with each."""
NUM_DECIDING = 8
"""Trajectories, one a task, at whose steps openings are scored."""


def symptoms(
    scorer: LogprobScorer,
    trees: Sequence[Tree],
    fmt: Format,
    tools: Collection[str],
    *,
    has_own_scores: bool = True,
) -> dict[str, float]:
    """Returns learn/success_logprob_change, learn/question_information and the learn/open_* of an
    update's trees as `LearnerLike.learn` has returned them, each only where there is something to
    measure.

    Args:
        tools: their names.
        has_own_scores: whether old log-probabilities are the learner's. Those of an engine differ
            from it without any learning, so no change is measured against them.
    """
    change = success_change(scorer, trees) if has_own_scores else {}
    return change | question_information(scorer, trees) | opening_probs(scorer, trees, fmt, tools)


def success_change(scorer: LogprobScorer, trees: Sequence[Tree]) -> dict[str, float]:
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
        for before, after in zip(chosen, scorer.with_logprobs(chosen), strict=True)
        for step, again in zip(before.steps, after.steps, strict=True)
        if step.old_logprobs is not None and again.old_logprobs is not None
        for old, new in zip(
            step.old_logprobs[step.sampled_mask].tolist(),
            again.old_logprobs[step.sampled_mask].tolist(),
            strict=True,
        )
    ]
    return {"learn/success_logprob_change": fmean(changes)} if changes else {}


def question_information(scorer: LogprobScorer, trees: Sequence[Tree]) -> dict[str, float]:
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
    firsts = {
        tuple(tree.root.token_ids.tolist()): step for tree in trees if (step := _first_step(tree))
    }
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
    scored = scorer.with_logprobs(crossed)
    # [question j][step i]
    scores = [[math.fsum(_scores(step)) for step in tree.steps[1:]] for tree in scored]
    gains = [row[i] - _log_mean_exp([other[i] for other in scores]) for i, row in enumerate(scores)]
    return {"learn/question_information": fmean(gains) / math.log(len(pairs))}


def opening_probs(
    scorer: LogprobScorer, trees: Sequence[Tree], fmt: Format, tools: Collection[str]
) -> dict[str, float]:
    """Returns the mean probability, at the steps where the policy called or answered, that it opens
    a call (learn/open_call_prob), an answer (learn/open_answer_prob), or either of them
    (learn/open_prob).

    p(o) = Π_t π(o_t | path, thought, o_<t)

    over the tokens o of an opening, such as "<search>", behind the step's own thought; summed over
    the tools. A text may be split into other tokens, so that each is a
    lower bound. Nothing of answers where the format cannot open one; nothing at all where it cannot
    open a call, or without tools. The steps are those of the first own trajectory of
    `NUM_DECIDING` trees.
    """
    if not (isinstance(fmt, Opening) and tools):
        return {}
    paths = [path for tree in trees if (path := _first_own(tree)) is not None]
    made = [_with_openings(path, fmt, tools) for path in paths[:NUM_DECIDING]]
    if not made:
        return {}
    calls, answers = [], []
    for (_, places), tree in zip(made, scorer.with_logprobs([one for one, _ in made]), strict=True):
        scores = {step.id: _scores(step) for step in tree.steps}
        for openings in places:
            probs = [(one.kind, one.prob(scores[one.step_id])) for one in openings]
            calls.append(math.fsum(prob for kind, prob in probs if kind == "call"))
            answers.append(math.fsum(prob for kind, prob in probs if kind == "answer"))
    call, answer = fmean(calls), fmean(answers)
    if not isinstance(fmt, AnswerOpening):
        return {"learn/open_call_prob": call}
    return {
        "learn/open_call_prob": call,
        "learn/open_answer_prob": answer,
        "learn/open_prob": call + answer,
    }


@dataclass(frozen=True, slots=True)
class _Scored:
    """An opening whose tokens are scored."""

    step_id: str
    kind: str
    num_tokens: int
    """Tokens of the opening, behind those of the thought."""

    def prob(self, scores: Sequence[float]) -> float:
        return math.exp(math.fsum(scores[len(scores) - self.num_tokens :]))


def _first_own(tree: Tree) -> Trajectory | None:
    """The first trajectory on which the policy called or answered."""
    own = (path for path in tree.trajectories() if not path.is_stored)
    return next((path for path in own if any(map(_decides, path.steps))), None)


def _decides(step: Step) -> bool:
    has_kind = bool(step.content.calls) or step.content.answer is not None
    return step.origin is Origin.POLICY and step.violation is None and has_kind


def _with_openings(
    path: Trajectory, fmt: Opening, tools: Collection[str]
) -> tuple[Tree, list[list[_Scored]]]:
    """The trajectory as a tree with all openings beside each step that decides, and the openings of
    each such step."""
    steps, leaves = list(path.steps), [path.leaf]
    places: list[list[_Scored]] = []
    for step in filter(_decides, path.steps):
        places.append([])
        for ids, (kind, num_tokens) in _ways(step.written_ids, tools, fmt).items():
            step_id = f"{step.parent}.{step.ordinals[-1] + len(places[-1]) + 1}"
            written = Written(StepContent(), [(ids, Origin.POLICY)])
            steps.append(plain_step(step_id, step.parent, written))
            leaves.append(replace(path.leaf, step_id=step_id))
            places[-1].append(_Scored(step_id, kind, num_tokens))
    steps.sort(key=lambda step: step.ordinals)
    tree = Tree(task=path.task, group_id="symptoms", steps=tuple(steps), leaves=tuple(leaves))
    return tree, places


def _ways(
    own: Sequence[int], tools: Collection[str], fmt: Opening
) -> dict[tuple[int, ...], tuple[str, int]]:
    """The different openings behind a step's thought: each one's kind, and how many of its tokens
    are not the thought's."""
    made = [("call", fmt.call_opening(own, one), fmt.call_opening((), one)) for one in tools]
    if isinstance(fmt, AnswerOpening):
        made.append(("answer", fmt.answer_opening(own), fmt.answer_opening(())))
    return {ids: (kind, _num_shared_at_end(ids, bare)) for kind, ids, bare in made}


def _num_shared_at_end(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(reversed(first), reversed(second), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


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
    own = tuple(step.token_ids[step.sampled_mask].tolist())
    return Written(replace(step.content, observations=()), [(own, Origin.POLICY)])


def _scores(step: Step) -> list[float]:
    """The learner's log-probabilities; none of a step without."""
    scores: list[float] = [] if step.old_logprobs is None else step.old_logprobs.tolist()
    return scores


def _log_mean_exp(values: Sequence[float]) -> float:
    peak = max(values)
    return peak + math.log(fmean(math.exp(value - peak) for value in values))
