"""The built-in reward functions, and the scorer that runs a recipe's on a tree.

A function gets lists with one entry per trajectory and returns one number each, or None where it
does not apply. The built-in ones reward the answer of a completed trajectory alone.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from treegraft.core.errors import SettingError
from treegraft.core.given import GIVEN
from treegraft.core.interfaces import RewardFunc
from treegraft.core.registry import find
from treegraft.core.types import Leaf, Origin, Status, Task, Trajectory, Tree
from treegraft.settings.config import Config
from treegraft.settings.tasks import RewardSettings
from treegraft.tasks import scoring
from treegraft.tasks.reward_calls import (
    Called,
    WrittenText,
    arguments_of,
    check_columns,
    check_function,
)

Accuracy = Literal["auto", "f1", "exact_match", "math"]

BAD_FORMAT = -1.0
"""The hierarchical reward of a trajectory without a well-formed answer."""
BOTH_TOOLS_BONUS = 0.1
"""r_M of ARPO, eq. 8."""
SUCCESS_REWARD = 1.0
"""Environment reward from which a trajectory without a reference is correct; 1 is a solved task in
TRL's and Gymnasium's worlds."""
BONUS_TOOLS = frozenset({"search", "python"})

WeightedReward = tuple[str, RewardFunc, float]
"""Name, function and weight."""
Measure = Callable[[str, Sequence[str]], float]
"""Compares an answer with the accepted ones."""


def answer_of(trajectory: Trajectory) -> str | None:
    """Returns the answer of a completed trajectory; None for any other."""
    return trajectory.leaf.answer if trajectory.status is Status.COMPLETED else None


def answer_reward(measure: Measure) -> RewardFunc:
    """Returns the reward function of a measure: 0.0 without an answer, None where the task has no
    reference."""

    def reward(*, trajectories: Sequence[Trajectory], **_: Any) -> list[float | None]:
        return [_score_answer(measure, trajectory) for trajectory in trajectories]

    return reward


def _score_answer(measure: Measure, trajectory: Trajectory) -> float | None:
    if trajectory.status is Status.FAILED or not trajectory.task.reference:
        return None
    answer = answer_of(trajectory)
    return float(measure(answer, trajectory.task.reference)) if answer else 0.0


exact_match_reward = answer_reward(scoring.exact_match)
"""1.0 for an exact match, else 0.0."""
f1_reward = answer_reward(scoring.f1)
"""SQuAD's F1, 0..1."""
math_reward = answer_reward(scoring.math_equal)
"""1.0 for equal mathematics, else 0.0."""


def hierarchical_reward(
    *, trajectories: Sequence[Trajectory], accuracy: Accuracy = "auto", **_: Any
) -> list[float | None]:
    """Returns ARPO's reward, -1..1.1 (arXiv 2507.19849, eq. 8); None where the task has no
    reference.

    R = -1 for a bad format or without an answer; 0 for a good format with Acc = 0; else Acc + r_M,
    where r_M = 0.1 if the agent called both search and python. Departures from the released code:
    the bonus counts the calls that the policy wrote, where the code looks for the closing tags
    anywhere, in tool output too; and Acc is token F1 there (`accuracy="f1"`), here by default
    `math_equal` for numbers and LaTeX, because F1 drops signs and points.
    """

    def reward(path: Trajectory) -> float | None:
        score = _score_answer(_ACCURACIES[accuracy], path)
        if score is None:
            return None
        # Truncated, violated, or an answer without text.
        if answer_of(path) is None:
            return BAD_FORMAT
        called: set[str] = set()
        for step in path.steps:
            # Calls that a graft brings are another agent's, and earn no bonus.
            if step.origin is Origin.POLICY:
                called.update(call.name for call in step.content.calls)
        return score + BOTH_TOOLS_BONUS if score > 0 and called >= BONUS_TOOLS else score

    return [reward(path) for path in trajectories]


def overlong_reward(
    *, trajectories: Sequence[Trajectory], limit: int, buffer: int, **_: Any
) -> list[float | None]:
    """Returns DAPO's soft penalty for long trajectories, -1..0.

    p = 0                              |y| <= L - B
    p = (L - B - |y|) / B              in between
    p = -1                             |y| >= L

    Source: Yu et al., arXiv 2503.14476, eq. 13. |y| counts the tokens that the agent wrote; tool
    results are no fault of its own.

    Args:
        limit: L, rollout.max_completion_tokens.
        buffer: B, the last tokens, over which it falls.
    """

    def penalty(path: Trajectory) -> float:
        past = sum(step.num_sampled for step in path.steps) - (limit - buffer)
        return -min(max(past / buffer, 0.0), 1.0)

    return [penalty(path) for path in trajectories]


def environment_reward(*, trajectories: Sequence[Trajectory], **_: Any) -> list[float | None]:
    """Returns the environment's reward for the state in which the trajectory ended, however it
    ended; None without one."""
    return [trajectory.leaf.environment_reward for trajectory in trajectories]


def build_rewards(settings: RewardSettings, max_tokens: int = 0) -> list[WeightedReward]:
    """Returns the reward functions of a recipe.

    Args:
        max_tokens: limit of a trajectory, for "overlong".

    Raises:
        SettingError: an unknown name, or an import path to nothing callable.
    """
    weights = [1.0] * len(settings.funcs) if settings.weights is None else settings.weights
    functions: list[RewardFunc] = []
    for name in settings.funcs:
        function = find(name, REWARDS, "reward", "reward.funcs")
        check_function(name, function)
        if name == "hierarchical":
            function = functools.partial(function, accuracy=settings.accuracy)
        if name == "overlong":
            # DAPO's L_cache is a fifth of its limit: 4,096 of 20,480 tokens.
            function = functools.partial(function, limit=max_tokens, buffer=max(1, max_tokens // 5))
        functions.append(function)
    # Metrics and recorded parts have the name of a given function, unless another one has it.
    names: list[str] = []
    for name in settings.funcs:
        bare = name.removeprefix(GIVEN)
        names.append(name if bare in settings.funcs else bare)
    return list(zip(names, functions, weights, strict=True))


def build_scorer(
    config: Config, rewards: Sequence[WeightedReward], written_text: WrittenText
) -> RewardScorer:
    """Returns the scorer of a recipe."""
    return RewardScorer(
        rewards,
        written_text=written_text,
        deadline_s=config.reward.deadline_s,
    )


def check_rewards(rewards: Sequence[WeightedReward], tasks: Sequence[Task]) -> None:
    """Raises SettingError for a function with an argument that a task has no column for."""
    for name, function, _ in rewards:
        check_columns(name, function, tasks)


class RewardScorer:
    """Fills in reward, parts and correctness of a tree's leaves.

    A function that raises, returns the wrong number of rewards or runs past the deadline makes the
    leaves it was asked about failed, with its name on them, and a reward that is no finite number
    its own leaf: the run goes on.
    """

    def __init__(
        self,
        functions: Sequence[WeightedReward],
        *,
        written_text: WrittenText,
        deadline_s: float = 60.0,
    ) -> None:
        """Args:
        written_text: from one step's sampled tokens to their text, `Format.written_text`.
        """
        self._functions = tuple(functions)
        self._calls = [Called(function) for _, function, _ in functions]
        # Scored like a reward, so that it has the deadline too: mathematics may take long.
        self._calls.append(Called(self._correctness))
        self._written_text = written_text
        self._deadline_s = deadline_s

    async def __call__(self, tree: Tree) -> Tree:
        """Returns the tree with its leaves scored; failed leaves stay as they are."""
        trajectories = [path for path in tree.trajectories() if path.status is not Status.FAILED]
        if not trajectories:
            return tree
        arguments = arguments_of(tree.task, trajectories, self._written_text)
        calls = (self._ask(one, arguments, len(trajectories)) for one in self._calls)
        # Failed leaves were not asked about, so their places are skipped below.
        by_leaf = zip(*await asyncio.gather(*calls), strict=True)
        leaves = list(tree.leaves)
        for number, leaf in enumerate(leaves):
            if leaf.status is not Status.FAILED:
                leaves[number] = self._scored(leaf, next(by_leaf), tree.task.id)
        return replace(tree, leaves=tuple(leaves))

    async def rehearse(self, tree: Tree) -> None:
        """Asks the functions about a tree of made completions, except those that have to be
        awaited, which may cost something. Raises `SettingError` for one that returns something
        else than a number or None for each; whatever else happens is left to the run."""
        arguments = arguments_of(tree.task, paths := tree.trajectories(), self._written_text)
        for (name, *_), function in zip(self._functions, self._calls, strict=False):
            outcomes = () if function.is_async else await self._ask(function, arguments, len(paths))
            if fault := next((one for one in outcomes if isinstance(one, _Unusable)), None):
                raise SettingError(
                    f"reward.funcs: '{name.removeprefix(GIVEN)}' was tried on {len(paths)} made"
                    f" completions of task '{tree.task.id}': {fault}.",
                    code="reward-tried",
                )

    def _correctness(self, *, trajectories: Sequence[Trajectory], **_: Any) -> list[float | None]:
        """By the answer where there is a reference, else by the environment's reward."""

        def is_correct(path: Trajectory) -> bool | None:
            if path.task.reference:
                answer = answer_of(path)
                return answer is not None and scoring.is_correct(answer, path.task.reference)
            given = path.leaf.environment_reward
            return None if given is None else given >= SUCCESS_REWARD

        return [is_correct(path) for path in trajectories]

    async def _ask(
        self, function: Called, arguments: Mapping[str, Any], num: int
    ) -> list[_Outcome]:
        """Returns a function's reward of each trajectory, or the one error for all of them."""
        # One for all trajectories of the tree: a judge may ask about them together.
        deadline = asyncio.timeout(self._deadline_s)
        try:
            async with deadline:
                returned = await function(arguments)
        # A user's function may raise anything; its failure is data on the leaves.
        except Exception as error:
            # A function's own TimeoutError is not told apart by its class.
            late = f"it took longer than reward.deadline_s = {self._deadline_s:g} s"
            return [late if deadline.expired() else f"{type(error).__name__}: {error}"] * num
        try:
            values = [] if isinstance(returned, str | Mapping) else list(returned)
        except TypeError:
            values = []
        if len(values) != num:
            told = f"it returned {returned!r:.80}, expected a list with one number for each"
            return [_Unusable(f"{told} of {num} completions (None where it does not apply)")] * num
        return [_checked(value) for value in values]

    def _scored(self, leaf: Leaf, outcomes: Sequence[_Outcome], task_id: str) -> Leaf:
        *rewards, is_correct = outcomes
        parts: dict[str, float] = {}
        total = 0.0
        for (name, _, weight), reward in zip(self._functions, rewards, strict=True):
            if isinstance(reward, str):
                return _fail(leaf, f"reward function '{name}' failed on task '{task_id}': {reward}")
            # None: it does not apply, and adds nothing, not even a 0 to the parts.
            if reward is not None:
                parts[name] = reward
                total += weight * reward
        if isinstance(is_correct, str):
            return _fail(leaf, f"the check of the answer failed on task '{task_id}': {is_correct}")
        # Without a reward a leaf would count as 0, and teach.
        if not parts:
            return _fail(
                leaf,
                f"no reward function applies to task '{task_id}': it has no reference, or its"
                " environment gave no reward (get_reward() returned None)",
            )
        correct = None if is_correct is None else bool(is_correct)
        return replace(leaf, reward=total, reward_parts=parts, is_correct=correct)


class _Unusable(str):
    """The error of a function that has returned something else than rewards."""


_Outcome = float | str | None
"""A reward, the error in its place, or None where the function does not apply."""


def _checked(value: Any) -> _Outcome:
    if value is None:
        return None
    # Numbers of numpy and torch are fine too.
    try:
        number = float(value)
    except (TypeError, ValueError):
        return _Unusable(f"it returned {value!r:.80} for a completion, expected a number or None")
    return number if math.isfinite(number) else f"it returned {number}, expected a finite number"


def _auto_accuracy(answer: str, reference: Sequence[str]) -> float:
    def accuracy(one: str) -> float:
        if scoring.is_mathematical(one):
            return float(scoring.math_equal(answer, one))
        # The second only matters for references that SQuAD normalises to nothing, such as "A".
        return max(scoring.f1(answer, one), scoring.exact_match(answer, one))

    return max(map(accuracy, reference))


_ACCURACIES: Mapping[Accuracy, Measure] = {
    "auto": _auto_accuracy,
    "f1": scoring.f1_papers,
    "exact_match": scoring.exact_match,
    "math": scoring.math_equal,
}

REWARDS: Mapping[str, RewardFunc] = {
    "hierarchical": hierarchical_reward,
    "exact_match": exact_match_reward,
    "f1": f1_reward,
    "math": math_reward,
    "environment": environment_reward,
    "overlong": overlong_reward,
}


def _fail(leaf: Leaf, error: str) -> Leaf:
    unscored = replace(leaf, reward=None, reward_parts={}, is_correct=None, has_loss=False)
    return replace(unscored, status=Status.FAILED, error=error)
