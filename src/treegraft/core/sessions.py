"""A trajectory's way to its tools: one session each, and the points at which another trajectory may
branch off."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from treegraft.core.interfaces import Tool
from treegraft.core.types import Observation, StepContent, Task, ToolCall


class Runner(Protocol):
    """What runs calls: the tool box."""

    async def call(self, call: ToolCall, task: Task, *, instead: Tool | None = None) -> Observation:
        """Returns the observation of a call; `instead` is run in the place of the tool of that
        name."""
        ...

    async def execute(self, tool: Tool, body: str, task: Task) -> Observation:
        """Returns the observation of a tool that is run again, by no agent's wish."""
        ...


class Point(Protocol):
    """Where a session comes from: the beginning of a task, or a step below which a branch may be
    opened."""

    def reserve(self, num: int) -> None:
        """Says that so many further sessions will be opened here, and no more."""
        ...

    async def open(self) -> Session:
        """Returns a session in the state of this point.

        Raises:
            ToolUnavailable: its environment cannot be had.
        """
        ...


class Session:
    """Calls of one trajectory; this one has no environment, so nothing is ever to be copied."""

    def __init__(self, runner: Runner, task: Task) -> None:
        self._runner, self._task = runner, task

    @property
    def can_branch(self) -> bool:
        """Whether a branch may be opened at the present state."""
        return True

    async def call(self, call: ToolCall) -> Observation:
        """Returns the result of a call, which may change the state.

        Raises:
            ToolUnavailable: a service or the environment failed.
        """
        return await self._runner.call(call, self._task)

    def mark(self) -> Point:
        """Returns the present state as a point."""
        return _Here(self)

    async def rehearse(self, values: Sequence[str | StepContent]) -> Session | None:
        """Returns a session in which another agent's steps have been done, None where the
        environment contradicts them.

        The session may be this one, where the steps change nothing; it goes on unchanged
        otherwise.
        """
        return self

    async def reward(self) -> float | None:
        """Returns the environment's reward of the present state; None without one. Raises
        `ToolUnavailable` as `call` does."""
        return None

    def release(self) -> None:
        """Says that no call will follow; points of it can still be opened."""


class Sessions:
    """The sessions of one tree; what they hold is freed at the end of the block."""

    def __init__(self, runner: Runner, task: Task) -> None:
        self._session = Session(runner, task)
        self._task = task

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Frees everything."""

    async def prepare(self, num: int) -> Task:
        """Begins `num` trajectories, and returns the task with what the environment says of its
        beginning."""
        return self._task

    def start(self, ordinal: int) -> Point:
        """Returns where the first-level rollout of this ordinal begins."""
        return _Here(self._session)

    def refuse(self, reason: str) -> None:
        """Lets all sessions opened from here on fail for this reason."""


class SessionOpener(Protocol):
    """Opens the sessions of a tree: the tool box, or whatever else runs an agent's calls."""

    def sessions(self, task: Task) -> Sessions:
        """Returns the sessions of one tree of the task."""
        ...


class _Here:
    """A session without a state is everybody's."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def reserve(self, num: int) -> None: ...

    async def open(self) -> Session:
        return self._session
