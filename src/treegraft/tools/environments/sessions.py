"""Sessions with an environment: its state moves with a trajectory's calls, and can be had again
where a branch opens.

A point of an environment that can fork holds a copy, made before the next call changes the state;
the last branch of a point takes the copy itself. A point of one that replays holds the calls so
far; a branch makes them again on a fresh environment and compares each whole result with what was
seen. How often that happens is a function of the tree alone, never of timing.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, fields, replace
from types import TracebackType
from typing import Any, TypeVar

from treegraft.core.errors import ToolError, ToolUnavailable
from treegraft.core.interfaces import Capability, EnvironmentKind, LiveEnvironment
from treegraft.core.sessions import Point, Runner, Session, Sessions
from treegraft.core.text import as_text, describe
from treegraft.core.types import Observation, StepContent, Task, ToolCall
from treegraft.settings.tools import EnvironmentSettings

T = TypeVar("T")

CLOSE_S = 5.0
"""Longest wait, at the end of a tree, for its environments to close."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Usage:
    """What environments did since the metrics were last taken; the fields are the metrics."""

    num_opened: int = 0
    num_forks: int = 0
    num_replays: int = 0
    num_replayed_calls: int = 0
    num_mismatches: int = 0
    num_failures: int = 0
    num_untrue_grafts: int = 0


@dataclass(eq=False)
class Environments:
    """The environments of a run: what makes them, their limits, and their numbers."""

    kind: EnvironmentKind
    settings: EnvironmentSettings
    usage: _Usage = field(default_factory=_Usage)
    left_behind: set[asyncio.Task[Any]] = field(default_factory=set)
    """What nobody waits for any more, kept from being collected."""

    def sessions(self, runner: Runner, task: Task) -> EnvironmentSessions:
        """Returns the sessions of one tree."""
        return EnvironmentSessions(self, runner, task)

    def take_metrics(self) -> dict[str, float]:
        """Returns the counts since the last take."""
        usage, self.usage = self.usage, _Usage()
        return {f"environment/{one.name}": float(getattr(usage, one.name)) for one in fields(usage)}

    async def bounded(self, work: Coroutine[Any, Any, T], what: str) -> T:
        """Returns the outcome of one method; past the deadline, or cancelled, it is left behind.

        Raises:
            ToolUnavailable: it failed or took too long.
        """
        run = asyncio.create_task(work)
        try:
            await asyncio.wait({run}, timeout=self.settings.deadline_s)
        finally:
            if not run.done():
                self.leave_behind(run)
        try:
            if not run.done():
                raise ToolUnavailable(
                    f"no end within environment.deadline_s = {self.settings.deadline_s:g} s"
                )
            return run.result()
        except (Exception, asyncio.CancelledError) as error:
            self.usage.num_failures += 1
            reason = str(error) if isinstance(error, ToolUnavailable) else describe(error)
            raise ToolUnavailable(f"environment '{self.kind.name}': {what}: {reason}") from error

    def leave_behind(self, run: asyncio.Task[Any]) -> None:
        """Cancels a run that nobody waits for."""
        run.cancel()
        self.left_behind.add(run)
        run.add_done_callback(self._forget)

    def _forget(self, run: asyncio.Task[Any]) -> None:
        self.left_behind.discard(run)
        if not run.cancelled() and run.exception() is not None:
            _log.info(
                "environment '%s': what was left behind ended with %s",
                self.kind.name,
                describe(run.exception()),
            )


@dataclass(frozen=True, slots=True)
class _Action:
    """A call that was made, and what came of it."""

    call: ToolCall
    digest: str
    """Of the whole result, before any cap."""
    begins: str
    """For a message."""


class _Recorded:
    """One tool of one environment, for the tool box to run; keeps the outcome."""

    description, cacheable = "", False

    def __init__(self, name: str, live: LiveEnvironment, capability: Capability) -> None:
        self.name, self.capability, self._live = name, capability, live
        self.outcome: str | None = None
        """The whole result, or the error that the agent made; None while the call has not ended by
        itself."""

    async def __call__(self, body: str, task: Task) -> str:
        try:
            text = as_text(await self._live.call(self.name, body, task))
        except ToolUnavailable:
            raise
        except ToolError as error:
            self.outcome = f"error: {error}"
            raise
        except (Exception, SystemExit) as error:
            self.outcome = f"error: {describe(error)}"
            raise
        self.outcome = text
        return text

    async def close(self) -> None:
        """Nothing to release: the session closes the environment."""

    def action(self, call: ToolCall) -> _Action | None:
        """Returns what was done; None where nobody knows."""
        if self.outcome is None:
            return None
        return _Action(
            call,
            hashlib.sha256(self.outcome.encode("utf-8", "surrogatepass")).hexdigest(),
            self.outcome[:80],
        )


class EnvironmentSessions(Sessions):
    """The sessions of one tree, and every environment made for it."""

    def __init__(self, environments: Environments, runner: Runner, task: Task) -> None:
        self.all, self.kind, self.runner = environments, environments.kind, runner
        self.names = frozenset(tool.name for tool in environments.kind.tools)
        self.task = task
        """What calls are told of; with the first observation once that is known."""
        self._bare_task = task
        self._first = ""
        self._refusal: str | None = None
        self._begun: list[asyncio.Task[tuple[LiveEnvironment, str]]] = []
        self._lives: set[LiveEnvironment] = set()
        self._closing: set[asyncio.Task[None]] = set()

    async def prepare(self, num: int) -> Task:
        """Begins `num` trajectories at once, and returns the task with what the first one that
        began was told.

        All trajectories of a tree have one prompt, so an environment that begins otherwise is
        refused when it is opened.
        """
        self._begun = [asyncio.create_task(self.begin()) for _ in range(num)]
        for begun in self._begun:
            await asyncio.wait({begun})
            if begun.exception() is None:
                self._first = begun.result()[1]
                break
        if self._first:
            question = "\n".join(part for part in (self._bare_task.question, self._first) if part)
            self.task = replace(self._bare_task, question=question)
        return self.task

    def start(self, ordinal: int) -> Point:
        """Returns where the first-level rollout of this ordinal begins: one begun already, or a
        fresh one."""
        return _Beginning(self, self._begun[ordinal] if ordinal < len(self._begun) else None)

    def refuse(self, reason: str) -> None:
        """Lets all sessions opened from here on fail for this reason."""
        self._refusal = reason

    async def begin(self) -> tuple[LiveEnvironment, str]:
        """Returns a fresh environment and its first observation. Raises `ToolUnavailable`."""
        live = self.kind.make()
        self._lives.add(live)
        self.all.usage.num_opened += 1
        try:
            return live, await self.all.bounded(live.reset(self._bare_task), "reset")
        except BaseException:
            self.free(live, is_broken=True)
            raise

    def check_first(self, first: str) -> None:
        """Raises `ToolUnavailable` for a beginning that another trajectory of this tree did not
        have, or a refused one."""
        if self._refusal is not None:
            raise ToolUnavailable(self._refusal)
        if first != self._first:
            self.all.usage.num_mismatches += 1
            raise ToolUnavailable(
                f"environment '{self.kind.name}': reset gave {first!r:.80}, but {self._first!r:.80}"
                " for the tree's first trajectory; expected a beginning that depends on the row"
                " alone."
            )

    async def fork(self, live: LiveEnvironment) -> LiveEnvironment:
        """Returns a copy. Raises `ToolUnavailable`."""
        self.all.usage.num_forks += 1
        making = asyncio.create_task(live.fork())
        try:
            copy = await self.all.bounded(_outcome(making), "fork")
        except BaseException:
            making.add_done_callback(self._discard)
            raise
        self._lives.add(copy)
        return copy

    def _discard(self, making: asyncio.Task[LiveEnvironment]) -> None:
        """Closes a copy that came too late."""
        if not making.cancelled() and making.exception() is None:
            self._lives.add(making.result())
            self.free(making.result(), is_broken=True)

    def free(self, live: LiveEnvironment, *, is_broken: bool = False) -> None:
        """Closes an environment; nobody waits for one that hangs already."""
        if live not in self._lives:
            return
        self._lives.discard(live)
        closing = asyncio.create_task(self._close(live))
        (self.all.left_behind if is_broken else self._closing).add(closing)
        closing.add_done_callback((self.all.left_behind if is_broken else self._closing).discard)

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Lets something end before the tree does."""
        task = asyncio.create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes all environments of the tree; those that do not end in time are left behind, with
        a warning."""
        for begun in self._begun:
            begun.cancel()
        await asyncio.gather(*self._begun, return_exceptions=True)
        try:
            async with asyncio.timeout(min(CLOSE_S, self.all.settings.deadline_s)):
                await self._close_all()
        except TimeoutError:
            _log.warning(
                "environment '%s': %d did not close within %g s",
                self.kind.name,
                len(self._closing),
                CLOSE_S,
            )
        finally:
            for task in list(self._closing):
                self.all.left_behind.add(task)
                task.add_done_callback(self.all.left_behind.discard)

    async def _close_all(self) -> None:
        while self._closing or self._lives:
            if self._closing:
                await asyncio.wait(self._closing)
            # Sessions that end may leave copies behind, so these come last.
            for live in list(self._lives):
                self.free(live)

    async def _close(self, live: LiveEnvironment) -> None:
        try:
            await live.close()
        except Exception as error:
            _log.warning("environment '%s' did not close: %s", self.kind.name, describe(error))


async def _outcome(making: asyncio.Task[T]) -> T:
    return await asyncio.shield(making)


class EnvironmentSession(Session):
    """One trajectory in its environment."""

    def __init__(
        self, owner: EnvironmentSessions, live: LiveEnvironment, history: Sequence[_Action] = ()
    ) -> None:
        super().__init__(owner.runner, owner.task)
        self.owner, self.live, self.history = owner, live, tuple(history)
        self.lock = asyncio.Lock()
        self._points: list[_ForkPoint] = []
        self._broken: str | None = None
        self._is_released = False

    @property
    def can_branch(self) -> bool:
        """Whether the state can be had again: never past `environment.max_replay_calls` where that
        takes a replay."""
        if self.owner.kind.capability is Capability.REPLAY:
            return len(self.history) <= self.owner.all.settings.max_replay_calls
        return self.owner.kind.capability is Capability.FORK

    async def call(self, call: ToolCall) -> Observation:
        """Returns the result of a call.

        Raises `ToolUnavailable` where the environment does not end the call, since its state is
        then unknown.
        """
        if call.name not in self.owner.names or call.problem is not None:
            return await super().call(call)
        async with self.lock:
            await self.take_points()
            self._refuse_broken()
            run = _Recorded(call.name, self.live, self.owner.kind.capability)
            try:
                observation = await self._runner.call(call, self._task, instead=run)
            except BaseException as error:
                self._broken = (
                    f"environment '{self.owner.kind.name}': {call.name}: {describe(error)}"
                )
                raise
            self._add(call, run)
            return observation

    async def make_again(self, actions: Sequence[_Action]) -> None:
        """Makes calls again. Raises `ToolUnavailable` where a result is not what it was."""
        usage, name = self.owner.all.usage, self.owner.kind.name
        for number, action in enumerate(actions, start=1):
            usage.num_replayed_calls += 1
            run = _Recorded(action.call.name, self.live, self.owner.kind.capability)
            await self._runner.execute(run, action.call.body, self._task)
            self._add(action.call, run)
            if self.history[-1].digest != action.digest:
                usage.num_mismatches += 1
                raise ToolUnavailable(
                    f"environment '{name}': replayed call {number} of {len(actions)},"
                    f" {action.call.name} {action.call.body!r:.80}, gave {run.outcome!r:.80}, but"
                    f" {action.begins!r} the first time; expected equal results of equal calls."
                    " Make it repeatable, or give it fork()."
                )

    def mark(self) -> Point:
        """Returns the present state as a point."""
        if self.owner.kind.capability is not Capability.FORK:
            return _ReplayPoint(self.owner, self.history)
        point = _ForkPoint(self)
        self._points.append(point)
        return point

    async def take_points(self) -> None:
        """Copies the present state for the points that were marked in it; the lock must be held."""
        while self._points:
            if self._broken is None:
                await self._points[0].take()
            else:
                self._points[0].error = self._broken
            self._points.pop(0)

    async def rehearse(self, values: Sequence[str | StepContent]) -> Session | None:
        """Returns a session in which another agent's calls have been made with the very results
        that it saw; None otherwise."""
        steps = [value for value in values if isinstance(value, StepContent)]
        told = [
            pair
            for step in steps
            for pair in zip(step.calls, step.observations, strict=False)
            if pair[0].name in self.owner.names
        ]
        num_calls = sum(call.name in self.owner.names for step in steps for call in step.calls)
        is_known = len(steps) == len(values) and num_calls == len(told)
        if is_known and not told:
            return self
        trial = await self._repeat(told) if is_known and self.can_branch else None
        self.owner.all.usage.num_untrue_grafts += trial is None
        return trial

    async def _repeat(self, told: Sequence[tuple[ToolCall, Observation]]) -> Session | None:
        point = self.mark()
        point.reserve(1)
        trial = await point.open()
        try:
            for call, observation in told:
                if (await trial.call(call)).text != observation.text:
                    trial.release()
                    return None
        except BaseException:
            trial.release()
            raise
        return trial

    async def reward(self) -> float | None:
        """Returns the environment's reward. Raises `ToolUnavailable` for a failure, and for what is
        no finite number."""
        if not self.owner.kind.has_reward:
            return None
        async with self.lock:
            await self.take_points()
            self._refuse_broken()
            value = await self.owner.all.bounded(self.live.reward(), "get_reward")
        if value is None:
            return None
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            self.owner.all.usage.num_failures += 1
            raise ToolUnavailable(
                f"environment '{self.owner.kind.name}': get_reward returned {value!r:.80}, expected"
                " a finite number or None"
            )
        return number

    def release(self) -> None:
        """Closes the environment once its points have their copies."""
        if not self._is_released:
            self._is_released = True
            self.owner.later(self._end())

    async def _end(self) -> None:
        async with self.lock:
            await self.take_points()
        self.owner.free(self.live, is_broken=self._broken is not None)

    def _add(self, call: ToolCall, run: _Recorded) -> None:
        action = run.action(call)
        if action is None:
            self.owner.all.usage.num_failures += 1
            self._broken = (
                f"environment '{self.owner.kind.name}': {call.name} did not end within"
                " tools.deadline_s, so its state is not known"
            )
            raise ToolUnavailable(self._broken)
        self.history = (*self.history, action)

    def _refuse_broken(self) -> None:
        if self._broken is not None:
            raise ToolUnavailable(self._broken)


class _Beginning:
    """Where a first-level rollout begins."""

    def __init__(
        self, owner: EnvironmentSessions, begun: asyncio.Task[tuple[LiveEnvironment, str]] | None
    ) -> None:
        self._owner, self._begun = owner, begun

    def reserve(self, num: int) -> None: ...

    async def open(self) -> Session:
        begun = self._owner.begin() if self._begun is None else asyncio.shield(self._begun)
        live, first = await begun
        self._owner.check_first(first)
        return EnvironmentSession(self._owner, live)


class _ReplayPoint:
    """A state that a fresh environment reaches by the same calls."""

    def __init__(self, owner: EnvironmentSessions, history: tuple[_Action, ...]) -> None:
        self._owner, self._history = owner, history

    def reserve(self, num: int) -> None: ...

    async def open(self) -> Session:
        self._owner.all.usage.num_replays += 1
        live, first = await self._owner.begin()
        session = EnvironmentSession(self._owner, live)
        try:
            self._owner.check_first(first)
            await session.make_again(self._history)
        except BaseException:
            session.release()
            raise
        return session


class _ForkPoint:
    """A state of which there is a copy, or will be before the next call changes it."""

    def __init__(self, session: EnvironmentSession) -> None:
        self._session, self._history = session, session.history
        self._lock = asyncio.Lock()
        self._copy: LiveEnvironment | None = None
        self._num_left = 0
        self.error: str | None = None
        """Why there is no copy."""

    def reserve(self, num: int) -> None:
        self._num_left += num

    async def take(self) -> None:
        """Copies the state, once; the session's lock must be held."""
        if self._copy is None and self.error is None:
            try:
                self._copy = await self._session.owner.fork(self._session.live)
            except ToolUnavailable as error:
                self.error = str(error)

    async def open(self) -> Session:
        owner = self._session.owner
        async with self._lock:
            if self._copy is None and self.error is None:
                async with self._session.lock:
                    await self._session.take_points()
            self._num_left -= 1
            if self._copy is None:
                raise ToolUnavailable(self.error or "the state at this step was not kept")
            live = self._copy if self._num_left == 0 else await owner.fork(self._copy)
        return EnvironmentSession(owner, live, self._history)
