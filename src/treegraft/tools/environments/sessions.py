"""Sessions with an environment: its state moves with a trajectory's calls, and is rebuilt where a
branch opens.

A point of an environment that replays holds the calls so far, which a branch makes again on a fresh
environment. A point of one that can fork is copied once a branch is granted, or before the state
changes while that is not decided; so the copies that branches take, and the replays, are a function
of the tree alone, never of timing.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self, TypeVar

from treegraft.core.errors import ToolError, ToolUnavailable
from treegraft.core.interfaces import Capability, EnvironmentKind, LiveEnvironment
from treegraft.core.sessions import COUNTS, Point, Runner, Session
from treegraft.core.text import as_text, describe
from treegraft.core.types import Observation, StepContent, Task, ToolCall
from treegraft.settings.tools import EnvironmentSettings
from treegraft.tools.background import Background
from treegraft.tools.environments.rehearsal import Counts, enacted, first_true

T = TypeVar("T")

CLOSE_S = 5.0
"""Longest wait, at the end of a tree, for its environments to close."""
MAX_REPLAY_CALLS = 20
"""Longest history that a branch re-executes: the cost of a branch grows with its place, and steps
behind more calls do not branch."""
_log = logging.getLogger(__name__)


class _Action(NamedTuple):
    """A call that was made."""

    call: ToolCall
    digest: str
    """Of the whole result, since a cap could hide a difference."""
    begins: str
    """The result's first characters, for a message."""


class Environments:
    """The environments of a run: their kind, their limits, and their counts."""

    def __init__(self, kind: EnvironmentKind, settings: EnvironmentSettings) -> None:
        self.kind = kind
        self.settings = settings
        self._counts = Counts()
        self.left_behind = Background()

    def sessions(self, runner: Runner, task: Task) -> TreeEnvironments:
        """Returns the sessions of one tree."""
        return TreeEnvironments(self, runner, task)

    @property
    def counts(self) -> Counts:
        """Where that is counted which happens now."""
        apart = COUNTS.get()
        if apart is None:
            return self._counts
        found: Counts = apart.setdefault("", Counts())
        return found

    def take_metrics(self) -> dict[str, float]:
        """Returns the counts since the last take."""
        taken = self._counts
        self._counts = Counts()
        counts = asdict(taken)
        num_copies = counts.pop("num_copies")
        metrics = {f"environment/{name}": float(count) for name, count in counts.items()}
        if self.kind.capability is Capability.FORK:
            metrics["time/environment_copies"] = float(num_copies)
        if taken.num_rehearsals:
            untrue_frac = taken.num_untrue_grafts / taken.num_rehearsals
            metrics["environment/untrue_graft_frac"] = untrue_frac
        return metrics

    def add_counts(self, counts: Mapping[str, Any]) -> None:
        """Adds what the environments of a tree in another process have counted."""
        for name, number in counts.items():
            setattr(self.counts, name, getattr(self.counts, name) + number)

    async def bounded(self, work: Awaitable[T], method: str, *, is_counted: bool = True) -> T:
        """Returns the outcome of one method; past the deadline, or cancelled, it is left behind.

        Args:
            is_counted: count a failure.

        Raises:
            ToolUnavailable: it failed or took too long.
        """
        run = await self.left_behind.run(work, self.settings.deadline_s)
        try:
            if not run.done():
                raise ToolUnavailable(
                    f"no end within environment.deadline_s = {self.settings.deadline_s:g} s",
                    code="environment-late",
                )
            return run.result()
        except (Exception, asyncio.CancelledError) as error:
            self.counts.num_failures += is_counted
            reason = str(error) if isinstance(error, ToolUnavailable) else describe(error)
            raise ToolUnavailable(
                f"environment '{self.kind.name}': {method}: {reason}", code="environment-failed"
            ) from error


class TreeEnvironments:
    """The sessions of one tree, and every environment made for it."""

    def __init__(self, run: Environments, runner: Runner, task: Task) -> None:
        self.run = run
        self.kind = run.kind
        self.runner = runner
        self.names = frozenset(tool.name for tool in run.kind.tools)
        self.task = task
        """The task of all calls; with the first observation once that is known."""
        self._bare_task = task
        self.first = ""
        """The first observation, common to all trajectories; empty for none."""
        self.refusal: str | None = None
        self._begun: list[asyncio.Task[tuple[LiveEnvironment, str]]] = []
        self._lives: set[LiveEnvironment] = set()
        self._closing: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Closes all environments of the tree; those that do not end in time are left behind, with
        a warning."""
        for begun in self._begun:  # those that no trajectory has opened
            begun.cancel()
        await asyncio.gather(*self._begun, return_exceptions=True)
        try:
            async with asyncio.timeout(min(CLOSE_S, self.run.settings.deadline_s)):
                while self._closing or self._lives:
                    if self._closing:
                        await asyncio.wait(self._closing)
                    # After the sessions, whose copies nobody may have opened.
                    for live in list(self._lives):
                        self.free(live)
        except TimeoutError:
            text = "environment '%s': %d did not close within %g s"
            _log.warning(text, self.kind.name, len(self._closing), CLOSE_S)
        finally:
            for task in self._closing:
                self.run.left_behind.hold(task)

    async def prepare(self, num: int) -> Task:
        """Begins `num` trajectories at once; returns the task with the observation of the first
        that began."""
        self._begun = [asyncio.create_task(self.begin()) for _ in range(num)]
        # In their order, not in that of arrival: the prompt must not depend on timing.
        for begun in self._begun:
            await asyncio.wait({begun})
            if begun.exception() is None:
                self.first = begun.result()[1]
                break
        if self.first:
            question = "\n".join(part for part in (self._bare_task.question, self.first) if part)
            self.task = self._bare_task.asking(question)
        return self.task

    def start(self, ordinal: int) -> Point:
        """Returns the beginning of the first-level rollout of this ordinal: one begun already, or a
        fresh one."""
        begun = self._begun[ordinal] if ordinal < len(self._begun) else None
        return _FreshPoint(self, begun=begun)

    def refuse(self, reason: str) -> None:
        """Makes every later opening of a session fail for this reason."""
        self.refusal = reason

    async def begin(self) -> tuple[LiveEnvironment, str]:
        """Returns a fresh environment and its first observation. Raises `ToolUnavailable`."""
        live = self.kind.make()
        self._lives.add(live)
        # Before it is known whether it begins: a failed start costs as much.
        self.run.counts.num_opened += 1
        try:
            return live, await self.run.bounded(live.reset(self._bare_task), "reset")
        except BaseException:
            self.free(live, is_broken=True)
            raise

    async def fork(self, live: LiveEnvironment) -> LiveEnvironment:
        """Returns a copy that is not counted as a fork. Raises `ToolUnavailable`."""
        self.run.counts.num_copies += 1
        making = asyncio.create_task(live.fork())

        def close_late(made: asyncio.Task[LiveEnvironment]) -> None:
            if not made.cancelled() and made.exception() is None:
                self.run.left_behind.hold(asyncio.create_task(self._close(made.result())))

        try:
            # Shielded: a copy that is cancelled half-way could not be closed.
            work = asyncio.shield(making)
            copy = await self.run.bounded(work, "fork", is_counted=False)
        except BaseException:
            making.add_done_callback(close_late)
            raise
        self._lives.add(copy)
        return copy

    def free(self, live: LiveEnvironment, *, is_broken: bool = False) -> None:
        """Closes an environment, once; the tree's end does not wait for a broken one, which may
        hang."""
        if live not in self._lives:
            return
        self._lives.discard(live)
        if is_broken:
            self.run.left_behind.hold(asyncio.create_task(self._close(live)))
        else:
            self.before_the_end(self._close(live))

    def before_the_end(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Starts work that the tree's end waits for; its failure is the caller's to look at."""

        def ended(task: asyncio.Task[T]) -> None:
            self._closing.discard(task)
            if not task.cancelled():
                task.exception()  # else asyncio logs that nobody has asked for it

        task = asyncio.create_task(work)
        self._closing.add(task)
        task.add_done_callback(ended)
        return task

    async def _close(self, live: LiveEnvironment) -> None:
        try:
            await live.close()
        except Exception as error:
            _log.warning("environment '%s' did not close: %s", self.kind.name, describe(error))


class EnvironmentSession:
    """One trajectory in its environment."""

    def __init__(
        self, tree: TreeEnvironments, live: LiveEnvironment, history: Sequence[_Action] = ()
    ) -> None:
        self.tree = tree
        self.live = live
        self.history = tuple(history)
        self._lock = asyncio.Lock()
        self._copies: list[asyncio.Task[LiveEnvironment]] = []
        self._points: list[_CopyPoint] = []
        """Of the present state, without a copy so far."""
        self._broken: str | None = None
        """Why the state is unknown."""
        self._is_released = False

    @property
    def can_branch(self) -> bool:
        """Whether the state can be had again: never past `MAX_REPLAY_CALLS` where that takes a
        replay."""
        if self.tree.kind.capability is Capability.REPLAY:
            return len(self.history) <= MAX_REPLAY_CALLS
        return self.tree.kind.capability is Capability.FORK

    async def call(self, call: ToolCall) -> Observation:
        """Returns the result of a call.

        Raises `ToolUnavailable` where the environment does not end the call, since its state is
        then unknown.
        """
        if call.name not in self.tree.names or call.problem is not None:
            return await self.tree.runner.call(call, self.tree.task)
        self._keep_points()
        async with self._settled():
            try:
                return await self._act(call)
            except BaseException as error:
                reason = f"environment '{self.tree.kind.name}': {call.name}: {describe(error)}"
                # The first reason: later ones follow from it.
                self._broken = self._broken or reason
                raise

    async def repeat(self, actions: Sequence[_Action]) -> None:
        """Makes calls again. Raises `ToolUnavailable` where a result differs from the first one."""
        usage = self.tree.run.counts
        name = self.tree.kind.name
        for number, action in enumerate(actions, start=1):
            usage.num_replayed_calls += 1
            await self._act(action.call, is_repeat=True)
            again = self.history[-1]
            if again.digest != action.digest:
                usage.num_mismatches += 1
                raise ToolUnavailable(
                    f"environment '{name}': replayed call {number} of {len(actions)},"
                    f" {action.call.name} {action.call.body!r:.80}, gave {again.begins!r}, but"
                    f" {action.begins!r} the first time; expected equal results of equal calls."
                    " Make it repeatable, or give it fork().",
                    code="replay-differs",
                )

    async def _act(self, call: ToolCall, *, is_repeat: bool = False) -> Observation:
        """Makes a call and adds it to the history."""
        outcomes: list[str] = []  # empty while the call has not ended by itself

        async def act() -> str:
            try:
                text = as_text(await self.live.call(call.name, call.body, self.tree.task))
            except ToolUnavailable:
                raise
            except (Exception, SystemExit) as error:  # an error is a result, which a replay repeats
                reason = str(error) if isinstance(error, ToolError) else describe(error)
                outcomes.append(f"error: {reason}")
                raise
            outcomes.append(text)
            return text

        observation = await self.tree.runner.call(call, self.tree.task, act, is_repeat=is_repeat)
        if not outcomes:
            # The deadline: the method may still be at work on the state.
            self.tree.run.counts.num_failures += 1
            self._broken = (
                f"environment '{self.tree.kind.name}': {call.name} did not end within"
                " tools.deadline_s, so its state is not known"
            )
            raise ToolUnavailable(self._broken, code="environment-broken")
        digest = hashlib.sha256(outcomes[0].encode("utf-8", "surrogatepass")).hexdigest()
        self.history = (*self.history, _Action(call, digest, outcomes[0][:80]))
        return observation

    def mark(self, is_wanted: Callable[[], bool] = lambda: True) -> Point:
        """Returns the present state as a point; arguments as in `Session`."""
        if self.tree.kind.capability is not Capability.FORK:
            return _FreshPoint(self.tree, self.history)
        point = _CopyPoint(self, self.history, is_wanted)
        self._points.append(point)
        return point

    def start_copy(self) -> asyncio.Task[LiveEnvironment]:
        """Starts a copy of the present state, which the next call waits for."""
        copy = self.tree.before_the_end(self._copy())
        self._copies.append(copy)
        return copy

    async def _copy(self) -> LiveEnvironment:
        async with self._lock:
            if self._broken is not None:
                raise ToolUnavailable(self._broken, code="environment-broken")
            return await self.tree.fork(self.live)

    def _keep_points(self) -> None:
        """Copies the state for its points before it changes."""
        points = self._points
        self._points = []
        for point in points:
            point.keep()

    @asynccontextmanager
    async def _settled(self) -> AsyncIterator[None]:
        """Holds the lock once all copies are made, so that a call may change the state. Raises
        `ToolUnavailable` where the state is unknown."""
        if self._copies:
            # Before the lock, which each of them takes.
            await asyncio.wait(self._copies)
        async with self._lock:
            if self._broken is not None:
                raise ToolUnavailable(self._broken, code="environment-broken")
            yield

    async def rehearse(
        self, candidates: Sequence[Sequence[str | StepContent]]
    ) -> tuple[int, Session] | None:
        """Returns the number of the first candidate whose results come true here, and a session in
        which its calls have been made; None where none does."""
        tree = self.tree
        copy = self._trial if self.can_branch else None
        found = await first_true(candidates, tree.names, tree.run.counts, copy)
        return None if found is None else (found[0], found[1] or self)

    async def _trial(self) -> Session:
        point = self.mark()
        point.reserve(1)
        return await point.open()

    async def enact(self, contents: Sequence[StepContent]) -> tuple[StepContent, ...]:
        """Makes the calls of a demonstration here and returns it with the results that came. Raises
        as in `Session`."""
        return await enacted(self, contents, self.tree.names)

    async def reward(self) -> float | None:
        """Returns the environment's reward. Raises `ToolUnavailable` for a failure, and for
        anything but a finite number or None."""
        # Before the points are copied, which only a call for a reward needs.
        if not self.tree.kind.has_reward:
            return None
        self._keep_points()
        async with self._settled():
            value = await self.tree.run.bounded(self.live.reward(), "get_reward")
        if value is None:
            return None
        number = math.nan
        with suppress(TypeError, ValueError):
            number = float(value)
        if not math.isfinite(number):
            self.tree.run.counts.num_failures += 1
            raise ToolUnavailable(
                f"environment '{self.tree.kind.name}': get_reward returned {value!r:.80}, expected"
                " a finite number or None",
                code="environment-reward-invalid",
            )
        return number

    def release(self) -> None:
        """Closes the environment once its points have their copies."""
        if not self._is_released:
            self._is_released = True
            self._keep_points()
            self.tree.before_the_end(self._end())

    async def _end(self) -> None:
        # Also a call that still runs is waited for, and the copies of its state.
        with suppress(ToolUnavailable):
            async with self._settled():
                pass
        self.tree.free(self.live, is_broken=self._broken is not None)


@dataclass(slots=True)
class _FreshPoint:
    """A state of a fresh environment: the beginning, or that after a replay of `history`."""

    tree: TreeEnvironments
    history: Sequence[_Action] | None = None
    begun: asyncio.Task[tuple[LiveEnvironment, str]] | None = None

    def reserve(self, num: int) -> None: ...

    async def open(self) -> EnvironmentSession:
        tree = self.tree
        tree.run.counts.num_replays += self.history is not None
        # Shielded: the tree's end closes an environment whose opener gives up.
        live, first = await (asyncio.shield(self.begun) if self.begun else tree.begin())
        session = EnvironmentSession(tree, live)
        try:
            if tree.refusal is not None:
                raise ToolUnavailable(tree.refusal, code="environment-refused")
            # All trajectories of a tree share one prompt, which holds the first observation.
            if first != tree.first:
                tree.run.counts.num_mismatches += 1
                raise ToolUnavailable(
                    f"environment '{tree.kind.name}': reset gave {first!r:.80}, but"
                    f" {tree.first!r:.80} for the tree's first trajectory; expected a beginning"
                    " that depends on the row alone.",
                    code="beginning-differs",
                )
            await session.repeat(self.history or ())
        except BaseException:
            session.release()
            raise
        return session


@dataclass(slots=True)
class _CopyPoint:
    """A state kept as a copy, made once it is needed."""

    session: EnvironmentSession
    """Stands in this state until it is copied."""
    history: Sequence[_Action]
    is_wanted: Callable[[], bool]
    copy: asyncio.Task[LiveEnvironment] | None = None
    is_failed: bool = False

    def keep(self) -> None:
        """Starts the copy, unless no branch will need it."""
        if self.copy is None and self.is_wanted():
            self.copy = self.session.start_copy()

    def reserve(self, num: int) -> None:
        """Announces branches, each of which gets a copy of this point's copy."""
        self.session.tree.run.counts.num_forks += num
        if self.copy is None:
            self.copy = self.session.start_copy()

    async def open(self) -> EnvironmentSession:
        """Returns a session on a copy. Raises `ToolUnavailable` where it cannot be made."""
        tree = self.session.tree
        if self.copy is None:
            self.reserve(1)
        assert self.copy is not None, "made with the reservation"
        try:
            live = await tree.fork(await asyncio.shield(self.copy))
        except ToolUnavailable:
            tree.run.counts.num_failures += not self.is_failed
            self.is_failed = True
            raise
        return EnvironmentSession(tree, live, self.history)
