"""How a trajectory reaches its tools: a session each, and points at which sessions are opened."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from typing import Any, Protocol, Self

from treegraft.core.types import Observation, StepContent, Task, ToolCall

Act = Callable[[], Awaitable[Any]]
"""Makes a call in one environment. Raises as a `Tool` does."""


class Untrue(Exception):
    """A result of another agent's call is not the one that comes here; the message says which."""


class Runner(Protocol):
    """Runs calls under deadlines and caps: the toolbox."""

    async def call(
        self, call: ToolCall, task: Task, act: Act | None = None, *, is_repeat: bool = False
    ) -> Observation:
        """Returns the observation of a call.

        Args:
            act: runs the call in place of the tool of that name.
            is_repeat: the agent made this call earlier, so it is not counted.

        Raises:
            ToolUnavailable: a service failed.
        """


class Point(Protocol):
    """A state in which sessions are opened: the beginning of a task, or a step to branch below."""

    def reserve(self, num: int) -> None:
        """Announces `num` further calls of `open`."""

    async def open(self) -> Session:
        """Returns a session in the state of this point.

        Raises:
            ToolUnavailable: the environment cannot be had.
        """


class Session(Protocol):
    """The calls of one trajectory."""

    @property
    def can_branch(self) -> bool:
        """Whether a branch may be opened at the present state."""

    async def call(self, call: ToolCall) -> Observation:
        """Returns the result of a call, which may change the state.

        Raises:
            ToolUnavailable: a service or the environment failed.
        """

    def mark(self, is_wanted: Callable[[], bool] = lambda: True) -> Point:
        """Returns the present state as a point, which may be opened until the tree is done.

        Args:
            is_wanted: called when the state is about to change; once False, the point is never
                opened, and the state need not stay for it.
        """

    async def rehearse(
        self, candidates: Sequence[Sequence[str | StepContent]]
    ) -> tuple[int, Session] | None:
        """Returns the number of the first candidate, steps of another agent, whose results come
        true here, and a session in which its calls have been made; this one where they change
        nothing.

        None where each has a result that differs; this session is unchanged then.
        """

    async def enact(self, contents: Sequence[StepContent]) -> tuple[StepContent, ...]:
        """Makes the calls of another agent's steps in this session, and returns the steps with
        the results that came.

        Raises:
            Untrue: a result differs from the one in the steps.
            ToolUnavailable: a service or the environment failed.
        """

    async def reward(self) -> float | None:
        """Returns the environment's reward of the present state; None without one. Raises
        `ToolUnavailable` as `call` does."""

    def release(self) -> None:
        """Ends the session; its points can still be opened."""


class Sessions(AbstractAsyncContextManager["Sessions"], Protocol):
    """The sessions of one tree; the end of the `async with` block frees all they hold."""

    async def prepare(self, num: int) -> Task:
        """Begins `num` trajectories; returns the task with the environment's first observation."""

    def start(self, ordinal: int) -> Point:
        """Returns the beginning of the first-level rollout of this ordinal."""

    def refuse(self, reason: str) -> None:
        """Makes every later opening of a session fail for this reason."""


class SessionOpener(Protocol):
    """Opens the sessions of a tree: the toolbox, or another runner of an agent's calls."""

    def sessions(self, task: Task) -> Sessions:
        """Returns the sessions of one tree of the task."""


COUNTS: ContextVar[dict[str, Any] | None] = ContextVar("counts", default=None)
"""Where the calls of a tree that grows for another process are counted, apart from those of others:
a dataclass for each tool by its name, and one of the environments by ""; None elsewhere."""


class SessionSource(Protocol):
    """Sessions with a state for each trajectory: the environments of a run."""

    def sessions(self, runner: Runner, task: Task) -> Sessions:
        """Returns the sessions of one tree; `runner` runs their calls."""

    def take_metrics(self) -> dict[str, float]:
        """Returns the counts since the last take."""

    def add_counts(self, counts: Mapping[str, Any]) -> None:
        """Adds what the sessions of a tree in another process have counted in `COUNTS`."""


class SharedSession:
    """The session, the sessions and the points of a tree without an environment."""

    # There is no state, so one object serves all trajectories, and every call of its own is empty.

    # No state that a branch could miss.
    can_branch = True

    def __init__(self, runner: Runner, task: Task) -> None:
        self._runner = runner
        self._task = task

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def prepare(self, num: int) -> Task:
        return self._task

    def start(self, ordinal: int) -> Point:
        return self

    def refuse(self, reason: str) -> None: ...

    def reserve(self, num: int) -> None: ...

    async def open(self) -> Session:
        return self

    async def call(self, call: ToolCall) -> Observation:
        return await self._runner.call(call, self._task)

    def mark(self, is_wanted: Callable[[], bool] = lambda: True) -> Point:
        return self

    async def rehearse(
        self, candidates: Sequence[Sequence[str | StepContent]]
    ) -> tuple[int, Session] | None:
        return 0, self

    async def enact(self, contents: Sequence[StepContent]) -> tuple[StepContent, ...]:
        return tuple(contents)

    async def reward(self) -> float | None:
        return None

    def release(self) -> None: ...
