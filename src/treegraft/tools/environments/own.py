"""Environments of the user's own: a class whose public methods are the agent's tools."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from treegraft.core.errors import SettingError, ToolError, ToolUnavailable
from treegraft.core.interfaces import Capability, Environment, Signature, Tool
from treegraft.core.keyed import keyed_int
from treegraft.core.text import as_text
from treegraft.core.types import Task
from treegraft.settings.tools import EnvironmentSettings
from treegraft.tools.function import FunctionTool, tag_of
from treegraft.tools.own_thread import OwnThread, run_either

OVER = "the episode is over; give your answer"
"""Told with the last result, in brackets, and to every call after it."""
NO_TOOLS = frozenset({"reset", "get_reward", "fork", "close"})
"""Public methods that are no tools."""


def ended(text: str) -> str:
    """Returns the last result of an episode as the agent is shown it."""
    return "\n".join(filter(None, (text, f"[{OVER}]")))


@dataclass(slots=True)
class EnvironmentTool:
    """The description of one action in an environment; a session runs it."""

    name: str
    description: str
    capability: Capability
    signature: Signature
    cacheable: bool = False
    """Never: a result depends on the state."""
    over: ClassVar[str] = OVER
    """What an agent reads once the episode has ended."""

    async def __call__(self, body: str, task: Task) -> str:
        """Raises `ToolUnavailable`: only a session knows its environment."""
        raise ToolUnavailable(
            f"'{self.name}' acts in an environment; it is called through a session of the toolbox",
            code="tool-outside-session",
        )

    async def close(self) -> None:
        """Nothing to release."""

    @staticmethod
    def tag_of(name: str) -> str:
        """Returns a name as a tag needs it: readFile2 gives read_file_two."""
        return tag_of(name)

    @staticmethod
    def reset_arguments(task: Task) -> dict[str, Any]:
        """Returns the arguments of an environment's reset; a task's own columns override ours,
        except the question."""
        # The seed from the task, so that every trajectory of a tree begins alike.
        added = {
            "reference": list(task.reference),
            "task_id": task.id,
            "seed": keyed_int("environment", task.id) % 2**31,
        }
        return added | dict(task.columns) | {"question": task.question, "prompt": task.question}


class ClassEnvironments:
    """Environments that are objects of one class."""

    def __init__(
        self,
        made: type,
        name: str,
        settings: EnvironmentSettings,
        maker: Callable[..., Any] | None = None,
    ) -> None:
        """Args:
            maker: makes each object, from the settings' options; None for the class itself.

        Raises:
            SettingError: a class that is no environment, or whose methods make no tools.
        """
        if not callable(getattr(made, "reset", None)):
            raise SettingError(
                f"environment.kind: '{name}' has no method reset; expected reset(**row), public"
                " methods as tools, and get_reward().",
                code="environment-without-reset",
            )
        self.name = name
        self.made = maker or made
        self.options = settings.options
        self.capability = capability_of(made, name, settings)
        self.has_reward = callable(getattr(made, "get_reward", None))
        self.has_fork = callable(getattr(made, "fork", None))
        self.has_close = callable(getattr(made, "close", None))
        self.is_blocking = getattr(made, "is_blocking", True) is not False
        methods = _methods(made, name)
        self.methods = {one.tool.name: one for one in methods}
        if not self.methods:
            raise SettingError(
                f"environment.kind: '{name}' has no public method beside"
                f" {', '.join(sorted(NO_TOOLS))}, so no tools.",
                code="environment-without-tools",
            )
        # One for each method: of two whose tools have one name, the toolbox refuses the second.
        tools: list[Tool] = []
        for one in methods:
            tool = one.tool
            tools.append(
                EnvironmentTool(tool.name, tool.description, self.capability, tool.signature)
            )
        self.tools: Sequence[Tool] = tools

    def make(self) -> ClassEnvironment:
        """Returns a fresh environment; `reset` makes the object itself."""
        return ClassEnvironment(self)


class ClassEnvironment:
    """One object of such a class, with a thread that only the copies of its own fork() share,
    unless the class says that no method blocks."""

    def __init__(
        self,
        kind: ClassEnvironments,
        made: Any = None,
        *,
        is_over: bool = False,
        thread: OwnThread | None = None,
    ) -> None:
        self._kind = kind
        self._object = made
        self._is_over = is_over
        self._thread = thread or OwnThread("treegraft-environment")
        self._run_plain: Callable[[Callable[[], Any]], Awaitable[Any]] = (
            self._thread.run if kind.is_blocking else _run_at_once
        )

    async def reset(self, task: Task) -> str:
        """Makes the object and returns the result of its reset as text; "" for None. Raises
        `ToolUnavailable` for a column that the task does not have."""
        # Made in the thread too: some objects, such as a database connection, stay in one thread.
        self._object = await self._run_plain(lambda: self._kind.made(**self._kind.options))
        method = self._object.reset
        row = EnvironmentTool.reset_arguments(task)
        given = accepted(method, row)
        try:
            inspect.signature(method).bind(**given)
        except TypeError as error:
            raise ToolUnavailable(
                f"{error}, but task '{task.id}' has the columns {', '.join(row)} alone. Name it as"
                " the data do, or give it a default",
                code="environment-column-missing",
            ) from error
        return as_text(await run_either(method, lambda: method(**given), self._run_plain))

    async def call(self, name: str, body: str, task: Task) -> Any:
        """Returns the method's result, with `OVER` after the one that ends the episode. Raises
        `ToolError` for a body that does not fit and after the end, and any exception of the
        method."""
        # The object may be closed inside, and would raise something obscure.
        if self._is_over:
            raise ToolError(OVER, code="episode-over")
        own = self._kind.methods[name]
        method = getattr(self._object, own.name)
        try:
            result = await own.tool.run(method, body, task, self._run_plain)
        # A method may set `done` and raise at the same time.
        except Exception:
            self._is_over = await self._run_plain(self._says_done)
            raise
        self._is_over = await self._run_plain(self._says_done)
        return ended(as_text(result)) if self._is_over else result

    async def reward(self) -> Any:
        """Returns the result of get_reward; None without that method."""
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
                " environment",
                code="fork-invalid",
            )
        # What fork() opened, such as a database connection, belongs to the thread it ran in.
        thread = self._thread.shared() if self._kind.has_fork else None
        return ClassEnvironment(self._kind, made, is_over=self._is_over, thread=thread)

    async def close(self) -> None:
        """Calls the object's close, where it has one, and ends the thread."""
        if self._kind.has_close and self._object is not None:
            await self._run(self._object.close)
        self._thread.end()

    def _says_done(self) -> bool:
        # A tool named done is no such word.
        return _is_flag(done := getattr(self._object, "done", None)) and bool(done)

    async def _run(self, method: Callable[[], Any]) -> Any:
        return await run_either(method, method, self._run_plain)


async def _run_at_once(call: Callable[[], Any]) -> Any:
    return call()


def _is_flag(value: Any) -> bool:
    # NumPy's have the name that NumPy 1 or 2 gives them.
    return isinstance(value, bool) or type(value).__name__ in ("bool", "bool_")


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
            " 'replay' or 'none'.",
            code="capability-unknown",
        )
    return Capability(declared)


def accepted(function: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries that a function without ** names; all of them for one with."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return dict(row)
    return {one.name: row[one.name] for one in parameters if one.name in row}


class _Method(NamedTuple):
    """A method that is a tool."""

    name: str
    """In the class."""
    tool: FunctionTool


def _methods(made: type, place: str) -> list[_Method]:
    """The public functions of a class and its parents, in the order of their definition, the
    class's own last."""
    # From the parents on: their tools keep their places, whatever a subclass adds or overrides.
    names = dict.fromkeys(name for parent in reversed(made.__mro__) for name in vars(parent))
    methods: list[_Method] = []
    for name in names:
        found = inspect.getattr_static(made, name)
        # A subclass removes a tool by another value of its name, such as None.
        if name.startswith("_") or name in NO_TOOLS or not inspect.isfunction(found):
            continue
        tool = FunctionTool(found, name=name, owner=f"'{place}'")
        methods.append(_Method(name, tool))
    return methods
