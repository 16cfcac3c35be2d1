"""Environments of the user's own: a class whose public methods are the agent's tools."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from treegraft.core.errors import SettingError, ToolUnavailable
from treegraft.core.interfaces import Capability, Environment, Signature, Tool
from treegraft.core.keyed import keyed_int
from treegraft.core.types import Task
from treegraft.settings.table import Settings
from treegraft.settings.tools import EnvironmentSettings
from treegraft.tools.function import FunctionTool
from treegraft.tools.own_thread import OwnThread, run_either

S = TypeVar("S", bound=Settings)

OVER = "the episode is over; give your answer"
"""The result of a call after the end."""
NO_TOOLS = frozenset({"reset", "get_reward", "fork", "close"})
"""Public methods that are no tools."""


@dataclass(slots=True)
class EnvironmentTool:
    """The description of one action in an environment; a session runs it."""

    name: str
    description: str
    capability: Capability
    signature: Signature
    cacheable: bool = False
    """Never: a result depends on the state."""

    async def __call__(self, body: str, task: Task) -> str:
        """Raises `ToolUnavailable`: only a session knows its environment."""
        raise ToolUnavailable(
            f"'{self.name}' acts in an environment; it is called through a session of the toolbox"
        )

    async def close(self) -> None:
        """Nothing to release."""


class ClassEnvironments:
    """Environments that are objects of one class."""

    def __init__(self, made: type, name: str, settings: EnvironmentSettings) -> None:
        """Raises `SettingError` for a class that is no environment, or whose methods make no
        tools."""
        if not callable(getattr(made, "reset", None)):
            raise SettingError(
                f"environment.kind: '{name}' has no method reset; expected reset(**row), public"
                " methods as tools, and get_reward()."
            )
        self.name = name
        self.made, self.options = made, settings.options
        self.capability = capability_of(made, name, settings)
        self.has_reward, self.has_fork, self.has_close = (
            callable(getattr(made, name, None)) for name in ("get_reward", "fork", "close")
        )
        tools = [FunctionTool(method, is_method=True) for method in _tool_methods(made)]
        self.methods = {tool.name: tool for tool in tools}
        if not self.methods:
            raise SettingError(
                f"environment.kind: '{name}' has no public method beside"
                f" {', '.join(sorted(NO_TOOLS))}, so no tools."
            )
        self.tools: Sequence[Tool] = [
            EnvironmentTool(tool.name, tool.description, self.capability, tool.signature)
            for tool in tools
        ]
        # Before the run: no object is made until the first trajectory.
        try:
            inspect.signature(made).bind(**settings.options)
        except TypeError as error:
            shown = json.dumps(settings.options, default=str)
            raise SettingError(
                f"environment.options: '{name}' cannot be made with {shown}: {error}."
            ) from error
        except ValueError:  # a class written in C has no signature
            pass

    def make(self) -> ClassEnvironment:
        """Returns a fresh environment; `reset` makes the object itself."""
        return ClassEnvironment(self)


class ClassEnvironment:
    """One object of such a class, with a thread of its own for methods that block."""

    def __init__(self, kind: ClassEnvironments, made: Any = None) -> None:
        self._kind, self._object = kind, made
        self._thread = OwnThread("treegraft-environment")

    async def reset(self, task: Task) -> str:
        """Makes the object and returns the result of its reset as text; "" for None."""
        # Made in the thread too: some objects, such as a database connection, stay in one thread.
        self._object = await self._thread.run(lambda: self._kind.made(**self._kind.options))
        method = self._object.reset
        row = accepted(method, row_of(task))
        first = await run_either(method, lambda: method(**row), self._thread.run)
        return "" if first is None else str(first)

    async def call(self, name: str, body: str, task: Task) -> Any:
        """Returns the method's result. Raises `ToolError` for a body that does not fit, and any
        exception of the method."""
        method = getattr(self._object, name)
        return await self._kind.methods[name].run(method, body, task, self._thread.run)

    async def reward(self) -> Any:
        """Returns the result of get_reward; None where there is no such method."""
        return await self._run(self._object.get_reward) if self._kind.has_reward else None

    async def fork(self) -> ClassEnvironment:
        """Returns a copy: the object's own fork, else a deep copy."""
        made = await self._run(
            self._object.fork if self._kind.has_fork else lambda: copy.deepcopy(self._object)
        )
        # The object itself would let two branches share one state.
        if made is self._object or not isinstance(made, Environment):
            raise ToolUnavailable(
                f"environment '{self._kind.name}': fork() returned {made!r:.80}, expected a further"
                " environment"
            )
        return ClassEnvironment(self._kind, made)

    async def close(self) -> None:
        """Calls the object's close, where it has one, and ends the thread."""
        if self._kind.has_close and self._object is not None:
            await self._run(self._object.close)
        self._thread.end()

    async def _run(self, method: Callable[[], Any]) -> Any:
        return await run_either(method, method, self._thread.run)


def capability_of(made: type, name: str, settings: EnvironmentSettings) -> Capability:
    """Returns the capability of the settings, else that of the class, else fork where it has that
    method, else none."""
    if settings.capability != "auto":
        return Capability(settings.capability)
    declared = getattr(made, "capability", None)
    if declared is None:
        return Capability.FORK if callable(getattr(made, "fork", None)) else Capability.NONE
    if declared not in (Capability.FORK, Capability.REPLAY, Capability.NONE):
        raise SettingError(
            f"environment.kind: '{name}' declares capability {declared!r}; expected 'fork',"
            " 'replay' or 'none'."
        )
    return Capability(declared)


def capability_without_fork(settings: EnvironmentSettings, reason: str) -> Capability:
    """Returns the capability of environments that cannot be copied; none unless declared.

    Raises `SettingError`, with the reason, where the settings ask for copies.
    """
    if settings.capability == "fork":
        raise SettingError(f"environment.capability: got 'fork', but {reason}; expected 'replay'.")
    return Capability.NONE if settings.capability == "auto" else Capability(settings.capability)


def options_of(table: type[S], settings: EnvironmentSettings) -> S:
    """Returns `environment.options` as a table. Raises `SettingError` for wrong ones."""
    try:
        return table(**settings.options)
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, one['loc']))}: {one['msg']}"
            for one in error.errors(include_url=False)
        )
        raise SettingError(
            f'environment.options: for "{settings.kind}": {faults}. It takes'
            f" {', '.join(table.model_fields)}."
        ) from error


def row_of(task: Task) -> dict[str, Any]:
    """Returns the arguments of reset; a task's own columns override ours, except the question."""
    # The seed from the task, so that every trajectory of a tree begins alike.
    added = {
        "reference": list(task.reference),
        "task_id": task.id,
        "seed": keyed_int("environment", task.id) % 2**31,
    }
    return added | dict(task.columns) | {"question": task.question, "prompt": task.question}


def accepted(function: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries that a function without ** names; all of them for one with."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return dict(row)
    return {one.name: row[one.name] for one in parameters if one.name in row}


def _tool_methods(made: type) -> list[Callable[..., Any]]:
    """The public functions of a class and its parents, in the order of their definition, the
    class's own last."""
    # From the parents on: their tools keep their places, whatever a subclass adds or overrides.
    names = dict.fromkeys(name for parent in reversed(made.__mro__) for name in vars(parent))
    public = [name for name in names if not name.startswith("_") and name not in NO_TOOLS]
    # A subclass removes a tool by another value of its name, such as None.
    return list(filter(inspect.isfunction, (inspect.getattr_static(made, name) for name in public)))
