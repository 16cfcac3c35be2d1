"""Runs the agents' tool calls: deadlines, output cap, caches, retries, a rate limit, and failures
as observations."""

from __future__ import annotations

import asyncio
import inspect
import logging
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from treegraft.core.errors import SettingError, ToolError, ToolUnavailable, nearest
from treegraft.core.interfaces import Tool
from treegraft.core.sessions import COUNTS, Act, Sessions, SessionSource, SharedSession
from treegraft.core.text import as_text, describe
from treegraft.core.types import Observation, Task, ToolCall
from treegraft.settings.tools import ToolsSettings
from treegraft.tools.background import Background
from treegraft.tools.cache import ResultCache

CACHE_ENTRIES = 20_000
"""Results kept; beyond, the oldest go. They change costs only, never an observation."""

NUM_RETRIES = 2
"""Further tries of a remote tool's call whose service failed: enough for a server that starts
again."""

BACKOFF_S = 0.5
"""Wait before the first of them; it doubles each time."""

MAX_STORED_CHARS = 1_000_000
"""Longer results are not kept on disk."""

_log = logging.getLogger(__name__)
_Key = tuple[str, str]
T = TypeVar("T")


@dataclass(slots=True)
class _Usage:
    """Counts of one tool since the metrics were last taken."""

    num_calls: int = 0
    num_failures: int = 0
    num_cached: int = 0
    num_runs: int = 0
    num_retries: int = 0
    latency_s: float = 0.0

    def add(self, counts: Mapping[str, Any]) -> None:
        """Adds counts by their names here."""
        for name, number in counts.items():
            setattr(self, name, getattr(self, name) + number)


class _Entry:
    """A tool of the box with its optional attributes and its usage."""

    def __init__(self, tool: Tool) -> None:
        self.tool = tool
        self.name = tool.name
        self.is_remote = bool(getattr(tool, "is_remote", False))
        self.deadline_s: float | None = getattr(tool, "deadline_s", None)
        self._usage = _Usage()

    @property
    def usage(self) -> _Usage:
        """Where a call is counted that is made now."""
        apart = COUNTS.get()
        if apart is None:
            return self._usage
        found: _Usage = apart.setdefault(self.name, _Usage())
        return found

    def take_usage(self) -> _Usage:
        """Returns the counts since the last take."""
        usage = self._usage
        self._usage = _Usage()
        return usage

    @property
    def fingerprint(self) -> str:
        # Read for each call: it may change, such as with the corpus of a server.
        return str(getattr(self.tool, "fingerprint", ""))


class Toolbox:
    """The tools of a run, called by name.

    Observations depend on the call alone, never on the cache or on timing (short of the deadline).
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        settings: ToolsSettings,
        environments: SessionSource | None = None,
    ) -> None:
        """Opens the cache file, if there is one.

        Args:
            environments: the state of each trajectory; their tools are among `tools`.

        Raises:
            SettingError: two tools of one name.
            DataError: a cache file that cannot be used.
        """
        has_store = bool(settings.cache_path) and settings.cache
        self._entries: dict[str, _Entry] = {}
        for tool in tools:
            if tool.name in self._entries:
                raise SettingError(
                    f"two tools are named '{tool.name}'; a name is the agent's tag and must be"
                    " unique. Leave one out, or rename one; of an environment's methods, a subclass"
                    " sets one to None.",
                    code="tools-same-name",
                )
            self._entries[tool.name] = _Entry(tool)
        self._settings = settings
        self._environments = environments
        self._store = ResultCache(settings.cache_path) if has_store else None
        self._cache: dict[_Key, Observation] = {}
        self._running: dict[_Key, asyncio.Task[Observation]] = {}
        self._left_behind = Background()
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    @property
    def tools(self) -> Mapping[str, Tool]:
        """The tools by name."""
        return {name: entry.tool for name, entry in self._entries.items()}

    def sessions(self, task: Task) -> Sessions:
        """Returns the sessions of one tree's trajectories, for an `async with` block."""
        if self._environments is None:
            return SharedSession(self, task)
        return self._environments.sessions(self, task)

    async def call(
        self, call: ToolCall, task: Task, act: Act | None = None, *, is_repeat: bool = False
    ) -> Observation:
        """Returns the tool's result, or the error that the agent is to read.

        Args:
            act: runs the call in place of the tool of that name; its result is not cached.
            is_repeat: the agent made this call earlier, so it is not counted.

        Raises `ToolUnavailable` when the tool says that its service is down.
        """
        entry = self._entries.get(call.name)
        if entry is None:
            known = ", ".join(self._entries) or "none"
            text = f"there is no tool '{call.name}' (there is: {known})"
            return self._observation(text + nearest(call.name, self._entries), is_error=True)
        # A replay is our doing, not the agent's.
        if is_repeat:
            return await self._execute(entry, call.body, task, act)
        usage = entry.usage
        usage.num_calls += 1
        if call.problem is not None:
            usage.num_failures += 1
            return self._observation(call.problem, is_error=True)
        try:
            if act is None and self._settings.cache and entry.tool.cacheable:
                observation = await self._cached(entry, call.body, task)
            else:
                observation = await self._execute(entry, call.body, task, act)
        except ToolUnavailable:
            usage.num_failures += 1
            raise
        usage.num_failures += observation.is_error
        return observation

    def add_usage(self, counts: Mapping[str, Mapping[str, Any]]) -> None:
        """Adds what a tree in another process has counted in `COUNTS`, as dicts."""
        for name, added in counts.items():
            if name:
                self._entries[name].usage.add(added)
            elif self._environments is not None:
                self._environments.add_counts(added)

    def take_metrics(self) -> dict[str, float]:
        """Returns calls, shares and mean latency per tool since the last take; no shares of tools
        without a call."""
        metrics = {} if self._environments is None else self._environments.take_metrics()
        for name, entry in self._entries.items():
            usage = entry.take_usage()
            metrics[f"tools/{name}_calls"] = float(usage.num_calls)
            if usage.num_calls:
                metrics[f"tools/{name}_failure_frac"] = usage.num_failures / usage.num_calls
                # Under time/, as this depends on which of two equal calls comes first.
                metrics[f"time/tool_{name}_cached_frac"] = usage.num_cached / usage.num_calls
            if usage.num_runs:
                metrics[f"time/tool_{name}_s"] = usage.latency_s / usage.num_runs
            if usage.num_retries:
                metrics[f"time/tool_{name}_retries"] = float(usage.num_retries)
        return metrics

    async def close(self) -> None:
        """Cancels what still runs and closes every tool; one that fails or hangs there is logged
        and left behind."""
        deadline_s = self._settings.deadline_s
        waiting = [*self._running.values(), *self._left_behind.tasks]
        for run in waiting:
            run.cancel()
        if waiting:
            # Briefly: a run that ignores its cancellation never ends.
            await asyncio.wait(waiting, timeout=min(1.0, deadline_s))
        for name, entry in self._entries.items():
            try:
                await asyncio.wait_for(entry.tool.close(), deadline_s)
            except Exception as error:
                _log.warning("tool '%s' did not close: %s", name, describe(error))
        if self._store is not None:
            self._store.close()

    async def _cached(self, entry: _Entry, body: str, task: Task) -> Observation:
        """Returns the observation from memory, from an equal call under way, or from `_stored`."""
        # Not by task: a cacheable tool gives every task the same.
        key = (entry.name, body)
        if key in self._cache:
            # Counted, but no mark on the observation, which must not depend on timing.
            entry.usage.num_cached += 1
            return self._cache[key]
        run = self._running.get(key)
        # A run of an earlier event loop can no longer be awaited.
        if run is None or run.get_loop() is not asyncio.get_running_loop():
            run = self._running[key] = asyncio.create_task(self._stored(entry, body, task))
            run.add_done_callback(lambda done: self._keep(key, done))
        else:
            entry.usage.num_cached += 1
        # Shielded: a caller that gives up leaves the run to the others, and to its deadline.
        return await asyncio.shield(run)

    def _keep(self, key: _Key, run: asyncio.Task[Observation]) -> None:
        if self._running.get(key) is run:
            del self._running[key]
        # An error may pass, so an equal call tries again.
        if run.cancelled() or run.exception() is not None or run.result().is_error:
            return
        # The oldest goes first: a dict keeps the order of insertion.
        self._cache[key] = run.result()
        if len(self._cache) > CACHE_ENTRIES:
            del self._cache[next(iter(self._cache))]

    async def _stored(self, entry: _Entry, body: str, task: Task) -> Observation:
        """Returns the observation from disk, else from a run."""
        # Without a fingerprint nothing tells whether the tool still gives the same result.
        if self._store is not None and entry.fingerprint:
            text = await self._on_disk(self._store.get, entry.name, entry.fingerprint, body)
            if text is not None:
                entry.usage.num_cached += 1
                return self._observation(text)
        return await self._execute(entry, body, task)

    async def _on_disk(self, method: Callable[..., T], *arguments: str) -> T | None:
        """Returns a cache method's result; None where it fails, which only costs another run."""
        try:
            return await asyncio.to_thread(method, *arguments)
        except (sqlite3.Error, TypeError, ValueError) as error:  # a damaged row is no JSON
            _log.warning("the tool cache '%s' failed: %s", self._settings.cache_path, error)
            return None

    async def _execute(
        self, entry: _Entry, body: str, task: Task, act: Act | None = None
    ) -> Observation:
        """Returns the observation of one run, at the latest when the deadline is over."""
        deadline_s = entry.deadline_s or self._settings.deadline_s
        # A semaphore belongs to one event loop; a toolbox may serve several, one after another.
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = (loop, asyncio.Semaphore(self._settings.max_concurrent))
        async with self._slots[1]:
            # The deadline counts from here: its place in the queue is no fault of the call.
            started = time.perf_counter()
            work = self._try(entry, body, task, act, time.monotonic() + deadline_s)
            try:
                run = await self._left_behind.run(work, deadline_s)
            finally:
                entry.usage.num_runs += 1
                entry.usage.latency_s += time.perf_counter() - started
        if run.done():
            return run.result()
        return self._observation(f"the call timed out after {deadline_s:g} s", is_error=True)

    async def _try(
        self, entry: _Entry, body: str, task: Task, act: Act | None, deadline: float
    ) -> Observation:
        """Returns the first result that the service did not fail, with doubling pauses between
        tries; an exception of the tool is an observation."""
        num_retries = NUM_RETRIES if entry.is_remote else 0
        for attempt in range(num_retries + 1):
            try:
                # A tool of the user's may be a plain function behind the protocol.
                result: Any = entry.tool(body, task) if act is None else act()
                if inspect.isawaitable(result):
                    result = await result
                text = as_text(result)
                is_kept = self._settings.cache and entry.tool.cacheable and entry.fingerprint
                if self._store is not None and is_kept and len(text) <= MAX_STORED_CHARS:
                    # The whole text, since another run may have another cap.
                    put = self._store.put
                    await self._on_disk(put, entry.name, entry.fingerprint, body, text)
                return self._observation(text)
            except ToolUnavailable:
                pause_s = BACKOFF_S * 2**attempt
                # A service that is down must not pass for an agent that asked for too much.
                if attempt == num_retries or time.monotonic() + pause_s >= deadline:
                    raise
            except ToolError as error:
                return self._observation(str(error) or "the call failed", is_error=True)
            except asyncio.CancelledError:
                # Ours, from the deadline or from `close`, else the tool's own.
                current = asyncio.current_task()
                if current is not None and current.cancelling():
                    raise
                return self._observation("the tool cancelled the call", is_error=True)
            except (KeyboardInterrupt, GeneratorExit):
                raise
            except BaseException as error:  # a panic of a library in Rust is no Exception
                return self._observation(describe(error), is_error=True)
            await asyncio.sleep(pause_s)
            entry.usage.num_retries += 1
        raise AssertionError("the last try returns or raises")

    def _observation(self, text: str, *, is_error: bool = False) -> Observation:
        """Returns the text in at most `max_output_chars` characters, with a note of a cut."""
        cap = self._settings.max_output_chars
        if len(text) <= cap:
            return Observation(text=text, is_error=is_error)
        note = f"\n[output cut: {len(text)} characters]"
        if 2 * len(note) > cap:  # more note than output
            note = " [cut]"
        text = text[: cap - len(note)] + note
        return Observation(text=text, is_error=is_error, is_truncated=True)
