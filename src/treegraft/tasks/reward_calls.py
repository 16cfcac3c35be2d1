"""What a reward function receives, by TRL's keywords or by verl's, and how it is called."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from treegraft.core.errors import SettingError, nearest
from treegraft.core.interfaces import RewardFunc
from treegraft.core.types import Origin, Task, Trajectory
from treegraft.tools.own_thread import run_in_thread

WrittenText = Callable[[Sequence[int]], str]
"""From the tokens that the policy sampled in one step to their text; see `Format.written_text`."""
OURS = ("prompts", "completions", "completion_ids", "trajectories")
"""Arguments of every reward function; a column of such a name does not arrive."""
_EXTRA = "reference"
"""An argument too, where the data set has no column of that name."""
_OF_VERL = frozenset({"solution_str", "ground_truth"})
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_function(name: str, function: Any) -> None:
    """Raises SettingError for a reward function that cannot be called by keywords."""
    fault = _fault_of(function)
    if fault:
        raise SettingError(
            f"reward.funcs names '{name}', which {fault}; expected a function with keyword"
            " arguments, such as def reward(*, completions, **columns). Write one around it.",
            code="reward-signature",
        )


def _fault_of(function: Any) -> str:
    if not callable(function):
        return f"is a {type(function).__name__}"
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return "has no signature that Python can show"
    for one in parameters:
        # Columns are passed by name.
        if one.kind is one.POSITIONAL_ONLY and one.default is one.empty:
            return f"takes '{one.name}' by position alone"
    if all(one.kind is one.VAR_POSITIONAL for one in parameters):
        return "takes no arguments by name"
    return ""


def check_columns(name: str, function: RewardFunc, tasks: Sequence[Task]) -> None:
    """Raises SettingError for a function that needs an argument which some task has no column
    for."""
    parameters = inspect.signature(function).parameters
    needed = {
        one.name
        for one in parameters.values()
        if one.default is one.empty and one.kind not in _VARIABLE
    }
    if scores_one(function):
        needed -= {*_OF_VERL, "extra_info"}
    else:
        needed -= {*OURS, _EXTRA}
    # Every task: one row without the column would fail its tree alone, late.
    for task in tasks if needed else ():
        missing = next((one for one in sorted(needed) if one not in task.columns), None)
        if missing is None:
            continue
        has = ", ".join(map(str, task.columns)) or "none"
        hint = nearest(missing, [*map(str, task.columns), *OURS])
        raise SettingError(
            f"reward.funcs: '{name}' needs the argument '{missing}', for which task '{task.id}' has"
            f" no column; its columns are {has}.{hint} Every reward function also gets"
            f" {', '.join((*OURS, _EXTRA))}. Rename a column, or give the argument a default.",
            code="reward-column-missing",
        )


def scores_one(function: RewardFunc) -> bool:
    """Returns whether a function has verl's signature, which is called for one trajectory at a
    time."""
    return inspect.signature(function).parameters.keys() >= _OF_VERL


def is_async(function: RewardFunc) -> bool:
    """Returns whether a function is a coroutine function, as those that ask a service are."""
    # The method of an object that is called is not a coroutine function itself.
    method = getattr(function, "__call__", None)  # noqa: B004
    return any(map(inspect.iscoroutinefunction, (function, method)))


def completion_ids(trajectory: Trajectory) -> list[int]:
    """Returns the tokens that the policy sampled, end tokens included."""
    ids: list[int] = []
    for step in trajectory.steps:
        ids += step.token_ids[step.sampled_mask].tolist()
    return ids


def completion_text(trajectory: Trajectory, written_text: WrittenText) -> str:
    """Returns what the agent wrote, markup included, a line break between two of its steps; no tool
    results, no grafted steps."""
    return "\n".join(_own_texts(trajectory, written_text).values())


def completion_messages(trajectory: Trajectory, written_text: WrittenText) -> list[dict[str, Any]]:
    """Returns the agent's turns and its tools' results as chat messages; no grafted steps.

    The content of an assistant's message is all that the agent wrote in that step, the markup of
    calls included; `tool_calls` holds the calls once more.
    """
    texts = _own_texts(trajectory, written_text)
    messages: list[dict[str, Any]] = []
    for step in trajectory.steps[1:]:
        # A graft is another agent's turn, which is not to be rewarded.
        if step.id not in texts:
            continue
        content = step.content
        turn: dict[str, Any] = {"role": "assistant", "content": texts[step.id]}
        if content.calls:
            turn["tool_calls"] = [_call(one.name, one.body) for one in content.calls]
        messages.append(turn)
        for call, seen in zip(content.calls, content.observations, strict=False):
            messages.append({"role": "tool", "name": call.name, "content": seen.text})
    # Functions of TRL read the first message, which a trajectory without any token has not.
    return messages or [{"role": "assistant", "content": ""}]


def _own_texts(trajectory: Trajectory, written_text: WrittenText) -> dict[str, str]:
    """The text of each step that the policy sampled, by the step's id, with a forced opening."""
    texts: dict[str, str] = {}
    for step in trajectory.steps:
        if step.origin is Origin.POLICY:
            texts[step.id] = written_text(step.written_ids)
    return texts


def _call(name: str, body: str) -> dict[str, Any]:
    try:
        arguments = json.loads(body)
    except (ValueError, RecursionError):
        arguments = body
    # A tool that takes one text has that text, which may look like a number.
    if not isinstance(arguments, dict):
        arguments = body
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


class Called:
    """A reward function with what its signature says, which is read once for all calls."""

    def __init__(self, function: RewardFunc) -> None:
        parameters = inspect.signature(function).parameters
        takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        self._function = function
        self._names = None if takes_all else tuple(parameters)
        self.is_async = is_async(function)
        self._scores_one = scores_one(function)

    async def __call__(self, arguments: Mapping[str, Any]) -> Any:
        """Returns what the function says of the trajectories in `arguments_of`, in their order."""
        if not self._scores_one:
            return await self._run(arguments)
        calls = _arguments_of_verl(arguments)
        if self.is_async:
            returned = await asyncio.gather(*(self._run(call) for call in calls))
        else:
            # One after another: a function need not be safe for threads.
            returned = [await self._run(call) for call in calls]
        # verl takes the entry "score" of a dict, and logs the others.
        return [one.get("score", one) if isinstance(one, Mapping) else one for one in returned]

    async def _run(self, arguments: Mapping[str, Any]) -> Any:
        """Calls the function with the arguments that it names, or with all where it takes
        **kwargs."""
        if self._names is not None:
            arguments = {name: arguments[name] for name in self._names if name in arguments}
        if self.is_async:
            return await self._function(**arguments)
        # Not `asyncio.to_thread`: a function that hangs would hold one of the few shared threads,
        # and the process could not end.
        returned = await run_in_thread(lambda: self._function(**arguments))
        return await returned if inspect.isawaitable(returned) else returned


def arguments_of(
    task: Task, trajectories: Sequence[Trajectory], written_text: WrittenText
) -> dict[str, Sequence[Any]]:
    """Returns the arguments of all reward functions for the trajectories of one tree."""
    # A text where the task came as one: what TRL calls a standard format.
    prompt: Any = task.question
    completions: list[Any] = [completion_text(path, written_text) for path in trajectories]
    if task.messages:
        prompt = [dict(message) for message in task.messages]
        completions = [completion_messages(path, written_text) for path in trajectories]
    columns = {_EXTRA: task.reference, **task.columns, "prompts": prompt}
    return {name: [value] * len(trajectories) for name, value in columns.items()} | {
        "completions": completions,
        "completion_ids": [completion_ids(path) for path in trajectories],
        "trajectories": trajectories,
    }


def _arguments_of_verl(arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """verl's keywords for each trajectory."""
    calls: list[dict[str, Any]] = []
    for said, path in zip(arguments["completions"], arguments["trajectories"], strict=True):
        text = said
        if not isinstance(said, str):
            text = "\n".join(turn["content"] for turn in said if turn["role"] == "assistant")
        columns = path.task.columns
        reference = path.task.reference
        truth = columns.get("ground_truth", reference[0] if len(reference) == 1 else [*reference])
        model = columns.get("reward_model")
        if isinstance(model, Mapping):
            truth = model.get("ground_truth", truth)
        given = columns.get("extra_info")
        extra = dict(given) if isinstance(given, Mapping) else {}
        # As verl counts them: the question, then the agent's turns and the results between.
        extra |= {"num_turns": 2 * len(path.steps[1:]), "rollout_reward_scores": {}}
        calls.append({**columns, "solution_str": text, "ground_truth": truth, "extra_info": extra})
    return calls
