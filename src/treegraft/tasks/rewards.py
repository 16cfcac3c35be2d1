"""Reward functions with TRL's keyword signature, and the scorer that runs them on a tree.

A function gets lists with one entry per trajectory and returns one number each, or None where it
does not apply. Only a completed trajectory has an answer that can earn something; what a tool wrote
earns nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from treegraft.core.errors import SettingError
from treegraft.core.interfaces import RewardFunc
from treegraft.core.plugins import pick
from treegraft.core.types import Leaf, Origin, Status, Trajectory, Tree
from treegraft.settings.tasks import RewardSettings
from treegraft.tasks import scoring

Accuracy = Literal["auto", "f1", "exact_match", "math"]

BAD_FORMAT = -1.0
"""What a trajectory without a well-formed answer earns from the hierarchical reward."""
BOTH_TOOLS_BONUS = 0.1
"""r_M of ARPO, eq. 8."""
BONUS_TOOLS = frozenset({"search", "python"})

_RESERVED = ("prompts", "completions", "completion_ids", "trajectories", "reference")


def exact_match_reward(*, trajectories: Sequence[Trajectory], **_: Any) -> list[float | None]:
    """Returns 1.0 for an exact match, 0.0 otherwise or without an answer; None where the task has
    no reference."""
    return [_score_answer(scoring.exact_match, trajectory) for trajectory in trajectories]


def f1_reward(*, trajectories: Sequence[Trajectory], **_: Any) -> list[float | None]:
    """Returns SQuAD's F1, 0..1, 0.0 without an answer; None where the task has no reference."""
    return [_score_answer(scoring.f1, trajectory) for trajectory in trajectories]


def math_reward(*, trajectories: Sequence[Trajectory], **_: Any) -> list[float | None]:
    """Returns 1.0 for equal mathematics, 0.0 otherwise or without an answer; None where the task
    has no reference."""
    return [_score_answer(_math_accuracy, trajectory) for trajectory in trajectories]


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
    measure = _ACCURACIES[accuracy]
    return [_score_hierarchically(measure, trajectory) for trajectory in trajectories]


def environment_reward(*, trajectories: Sequence[Trajectory], **_: Any) -> list[float | None]:
    """Returns what the environment gave for the state in which the trajectory ended, however it
    ended; None without one."""
    return [trajectory.leaf.environment_reward for trajectory in trajectories]


def build_rewards(settings: RewardSettings) -> list[tuple[str, RewardFunc, float]]:
    """Returns name, function and weight of each reward function of the recipe.

    Raises:
        SettingError: an unknown name, an import path to nothing callable, a name given twice, or
            more or fewer weights than functions.
    """
    weights = [1.0] * len(settings.funcs) if settings.weights is None else settings.weights
    if not settings.funcs:
        raise SettingError(
            "reward.funcs is empty; name at least one reward function, e.g. 'hierarchical'"
        )
    if len(weights) != len(settings.funcs):
        raise SettingError(
            f"reward.weights has {len(weights)} entries for the {len(settings.funcs)} functions of"
            f" reward.funcs ({', '.join(settings.funcs)}); give one weight per function, or none"
            " for 1 each"
        )
    repeated = sorted({name for name in settings.funcs if settings.funcs.count(name) > 1})
    if repeated:
        raise SettingError(
            f"reward.funcs names '{repeated[0]}' twice; name it once and give it a weight"
        )
    functions = [_find_function(name, settings.accuracy) for name in settings.funcs]
    return list(zip(settings.funcs, functions, weights, strict=True))


class RewardScorer:
    """Fills in reward, parts and correctness of a tree's leaves.

    A function that raises, returns the wrong number of rewards or runs past the deadline makes the
    leaves it was asked about failed, with its name on them, and a reward that is no finite number
    its own leaf: the run goes on.
    """

    def __init__(
        self,
        functions: Sequence[tuple[str, RewardFunc, float]],
        *,
        deadline_s: float = 60.0,
        success_reward: float = 1.0,
    ) -> None:
        """Args: success_reward: environment reward from which a trajectory without a reference
        counts as correct.
        """
        self._functions = tuple(functions)
        self._deadline_s = deadline_s
        self._correctness = functools.partial(_correctness, success_reward)

    @classmethod
    def from_settings(
        cls, settings: RewardSettings, *, success_reward: float = 1.0
    ) -> RewardScorer:
        """Returns the scorer of a recipe. Raises SettingError as `build_rewards` does."""
        return cls(
            build_rewards(settings), deadline_s=settings.deadline_s, success_reward=success_reward
        )

    async def __call__(self, tree: Tree) -> Tree:
        """Returns the tree with its leaves scored; failed leaves stay as they are."""
        trajectories = [
            trajectory
            for trajectory in tree.trajectories()
            if trajectory.status is not Status.FAILED
        ]
        if not trajectories:
            return tree
        columns = _columns(trajectories)
        calls = [
            self._ask(name, function, columns, trajectories)
            for name, function, _ in self._functions
        ]
        correctness = self._ask("is_correct", self._correctness, columns, trajectories)
        *results, correct = await asyncio.gather(*calls, correctness)
        scored = iter(
            [
                self._score_leaf(trajectory.leaf, index, results, correct, tree.task.id)
                for index, trajectory in enumerate(trajectories)
            ]
        )
        leaves = tuple(
            leaf if leaf.status is Status.FAILED else next(scored) for leaf in tree.leaves
        )
        return replace(tree, leaves=leaves)

    async def _ask(
        self,
        name: str,
        function: RewardFunc,
        columns: Mapping[str, Any],
        trajectories: Sequence[Trajectory],
    ) -> _Result:
        """Returns a function's rewards, or the one error that stands for all of them."""
        deadline = asyncio.timeout(self._deadline_s)
        try:
            async with deadline:
                returned = await _call(function, columns)
            values = list(returned)
        except (
            Exception
        ) as error:  # a user's function may raise anything; its failure is data on the leaves
            if deadline.expired():
                return _Result(
                    name, error=f"it took longer than reward.deadline_s = {self._deadline_s:g} s"
                )
            return _Result(name, error=f"{type(error).__name__}: {error}")
        if len(values) != len(trajectories):
            return _Result(
                name,
                error=f"it returned {len(values)} rewards for {len(trajectories)} trajectories",
            )
        return _Result(name, values=tuple(values))

    def _score_leaf(
        self, leaf: Leaf, index: int, results: Sequence[_Result], correct: _Result, task_id: str
    ) -> Leaf:
        parts: dict[str, float] = {}
        total = 0.0
        for (name, _, weight), result in zip(self._functions, results, strict=True):
            reward, error = result.at(index)
            if error is not None:
                return _fail(leaf, f"reward function '{name}' failed on task '{task_id}': {error}")
            if reward is not None:
                parts[name] = reward
                total += weight * reward
        is_correct, error = correct.at(index)
        if error is not None:
            return _fail(leaf, f"the check of the answer failed on task '{task_id}': {error}")
        if not parts:
            return _fail(
                leaf, f"no reward function applies to task '{task_id}'; has it a reference?"
            )
        return replace(
            leaf,
            reward=total,
            reward_parts=parts,
            is_correct=None if is_correct is None else bool(is_correct),
        )


@dataclass(frozen=True, slots=True)
class _Result:
    """What one function returned for a tree: a value per trajectory, or one error for all."""

    name: str
    values: tuple[Any, ...] = ()
    error: str | None = None

    def at(self, index: int) -> tuple[float | None, str | None]:
        """Returns the number (None: does not apply) and the error (None: there is none) of one
        trajectory."""
        if self.error is not None:
            return None, self.error
        value = self.values[index]
        if value is None:
            return None, None
        try:
            number = float(value)
        except (TypeError, ValueError):
            return None, f"it returned {value!r:.80}, expected a number or None"
        return (
            (number, None)
            if math.isfinite(number)
            else (None, f"it returned {number}, expected a finite number")
        )


def written_text(trajectory: Trajectory) -> str:
    """Returns what the agent wrote: thoughts, calls as "name: body", and the answer; no tool text,
    no grafted steps."""
    parts: list[str] = []
    for step in trajectory.steps[1:]:
        if step.origin is Origin.POLICY:
            content = step.content
            parts += [
                content.thought,
                *(f"{call.name}: {call.body}" for call in content.calls),
                content.answer or "",
            ]
    return "\n".join(part for part in parts if part)


def _given_answer(trajectory: Trajectory) -> str | None:
    return trajectory.leaf.answer if trajectory.status is Status.COMPLETED else None


def _score_answer(
    measure: Callable[[str, Sequence[str]], float], trajectory: Trajectory
) -> float | None:
    if trajectory.status is Status.FAILED or not trajectory.task.reference:
        return None
    answer = _given_answer(trajectory)
    return 0.0 if answer is None else float(measure(answer, trajectory.task.reference))


def _score_hierarchically(
    measure: Callable[[str, Sequence[str]], float], trajectory: Trajectory
) -> float | None:
    accuracy = _score_answer(measure, trajectory)
    if accuracy is None:
        return None
    if _given_answer(trajectory) is None:
        return BAD_FORMAT
    return (
        accuracy + BOTH_TOOLS_BONUS if accuracy > 0 and _used_both_tools(trajectory) else accuracy
    )


def _used_both_tools(trajectory: Trajectory) -> bool:
    policy_steps = (step for step in trajectory.steps if step.origin is Origin.POLICY)
    return {call.name for step in policy_steps for call in step.content.calls} >= BONUS_TOOLS


def _math_accuracy(answer: str, reference: Sequence[str]) -> float:
    return float(scoring.math_equal(answer, reference))


def _auto_accuracy(answer: str, reference: Sequence[str]) -> float:
    return max(_auto_accuracy_one(answer, one) for one in reference)


def _auto_accuracy_one(answer: str, reference: str) -> float:
    if scoring.is_mathematical(reference):
        return float(scoring.math_equal(answer, reference))
    # The second only matters for references that SQuAD normalises to nothing, such as "A".
    return max(scoring.f1(answer, reference), scoring.exact_match(answer, reference))


_ACCURACIES: Mapping[Accuracy, Callable[[str, Sequence[str]], float]] = {
    "auto": _auto_accuracy,
    "f1": scoring.f1_papers,
    "exact_match": scoring.exact_match,
    "math": _math_accuracy,
}

REWARDS: Mapping[str, RewardFunc] = {
    "hierarchical": hierarchical_reward,
    "exact_match": exact_match_reward,
    "f1": f1_reward,
    "math": math_reward,
    "environment": environment_reward,
}


def _find_function(name: str, accuracy: Accuracy) -> RewardFunc:
    if name == "hierarchical":
        return functools.partial(hierarchical_reward, accuracy=accuracy)
    function = pick(name, REWARDS, "reward.funcs")
    if not callable(function):
        raise SettingError(
            f"reward.funcs names '{name}', which is a {type(function).__name__}; expected a"
            " function"
        )
    return function  # type: ignore[no-any-return]  # what an import path holds is known only to be callable


def _correctness(
    success_reward: float, *, trajectories: Sequence[Trajectory], **_: Any
) -> list[bool | None]:
    """By the answer where there is a reference, else by what the environment gave."""
    values: list[bool | None] = []
    for trajectory in trajectories:
        answer, reference, given = (
            _given_answer(trajectory),
            trajectory.task.reference,
            trajectory.leaf.environment_reward,
        )
        if reference:
            values.append(answer is not None and scoring.is_correct(answer, reference))
        else:
            values.append(None if given is None else given >= success_reward)
    return values


def _columns(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    task = trajectories[0].task
    columns: dict[str, Any] = {
        name: [value] * len(trajectories)
        for name, value in task.columns.items()
        if name not in _RESERVED
    }
    return columns | {
        "prompts": [trajectory.task.question for trajectory in trajectories],
        "completions": [written_text(trajectory) for trajectory in trajectories],
        "completion_ids": [trajectory.completion_ids for trajectory in trajectories],
        "trajectories": list(trajectories),
        "reference": [trajectory.task.reference for trajectory in trajectories],
    }


async def _call(function: RewardFunc, columns: Mapping[str, Any]) -> Any:
    accepted = _accepted(function, columns)
    call = getattr(function, "__call__", None)  # noqa: B004
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call):
        return await function(**accepted)
    returned = await _in_thread(functools.partial(function, **accepted))
    return await returned if inspect.isawaitable(returned) else returned


def _accepted(function: RewardFunc, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the columns that a function without **kwargs names; all of them for one with."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some callables written in C have no signature
        return dict(columns)
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return dict(columns)
    names = {parameter.name for parameter in parameters}
    return {name: values for name, values in columns.items() if name in names}


async def _in_thread(function: Callable[[], Any]) -> Any:
    """Returns what the function returns, run in a thread of its own.

    A daemon thread, not `asyncio.to_thread`: a function that hangs would hold one of the few shared
    threads, and the process could not end.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not done.done():
            set_outcome(outcome)

    def work() -> None:
        try:
            outcome: tuple[Callable[[Any], None], Any] = (done.set_result, function())
        except BaseException as error:  # handed to the waiting coroutine, whatever it is
            outcome = (done.set_exception, _as_exception(error))
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=work, daemon=True, name="treegraft-reward").start()
    return await done


def _as_exception(error: BaseException) -> Exception:
    # A future refuses StopIteration, and SystemExit in a reward function must not end the run.
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def _fail(leaf: Leaf, error: str) -> Leaf:
    return replace(
        leaf,
        status=Status.FAILED,
        reward=None,
        reward_parts={},
        is_correct=None,
        has_loss=False,
        error=error,
    )
