"""Runs the agents' tool calls: deadlines, output cap, caches, retries, a rate limit, and failures
as observations."""

from __future__ import annotations

import asyncio
import inspect
import logging
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treegraft.core.errors import SettingError, ToolError, ToolUnavailable, nearest
from treegraft.core.interfaces import Tool
from treegraft.core.sessions import Sessions
from treegraft.core.text import as_text, describe
from treegraft.core.types import Observation, Task, ToolCall
from treegraft.settings.tools import ToolsSettings
from treegraft.tools.cache import ResultCache
from treegraft.tools.environments.sessions import Environments

CACHE_ENTRIES = 20_000
"""Results kept; beyond, the oldest go. They change costs only, never an observation."""

MAX_STORED_CHARS = 1_000_000
"""Longer results are not kept on disk."""

_log = logging.getLogger(__name__)
_Key = tuple[str, str]


@dataclass(slots=True)
class _Usage:
    """What one tool did since the metrics were last taken."""

    num_calls: int = 0
    num_failures: int = 0
    num_cached: int = 0
    num_runs: int = 0
    num_retries: int = 0
    latency_s: float = 0.0


class Toolbox:
    """The tools of a run, called by name.

    Observations depend on the call alone, never on the cache or on timing (short of the deadline):
    `is_cached` stays False, since which of two equal calls comes first is a matter of luck; hits
    are counted in the metrics.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        *,
        deadline_s: float,
        max_output_chars: int,
        cache: bool,
        max_concurrent: int,
        num_retries: int = 0,
        backoff_s: float = 0.5,
        max_calls_per_s: float | None = None,
        store: ResultCache | None = None,
        replay: bool = False,
        environments: Environments | None = None,
    ) -> None:
        """Args: deadline_s: longest run of one call, retries included, in seconds, counted from its
        start and not from its place in
            the queue.
        max_output_chars: longest text of an observation, its note about the cut included. cache:
        answer repeated calls of cacheable tools from memory, and from `store`. max_concurrent:
        calls that run at once. num_retries: further tries of a remote tool's call whose service
        failed. backoff_s: wait before the first of them, in seconds; it doubles each time.
        max_calls_per_s: calls of one remote tool started in a second; None for no limit. store:
        results on disk, of cacheable tools with a fingerprint; None for none. Closed with the box.
        replay: such tools are never run; a call that `store` does not hold raises
        `ToolUnavailable`. environments: what each trajectory acts in; their tools are among
        `tools`. None for none.

        Raises `SettingError` for two tools of one name, and for a replay without a store.
        """
        if replay and (store is None or not cache):
            raise SettingError(
                "tools.replay answers from tools.cache_path alone: name the file, and leave"
                " tools.cache on."
            )
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            if tool.name in self._tools:
                raise SettingError(
                    f"two tools are named '{tool.name}'; a name is the agent's tag and must be"
                    " unique."
                )
            self._tools[tool.name] = tool
        self._deadline_s = deadline_s
        self._max_output_chars = max_output_chars
        self._is_caching = cache
        self._max_concurrent = max_concurrent
        self._num_retries = num_retries
        self._backoff_s = backoff_s
        self._interval_s = 1 / max_calls_per_s if max_calls_per_s else 0.0
        self._next_start: dict[str, float] = {}
        self._store = store
        self._is_replay = replay
        self._environments = environments
        self._cache: dict[_Key, Observation] = {}
        self._running: dict[_Key, asyncio.Task[Observation]] = {}
        self._left_behind: set[asyncio.Task[Any]] = set()
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._usage = {name: _Usage() for name in self._tools}

    @classmethod
    def from_settings(
        cls,
        tools: Sequence[Tool],
        settings: ToolsSettings,
        environments: Environments | None = None,
    ) -> Toolbox:
        """Returns the box that `settings` describe; raises `DataError` for a cache file that cannot
        be used."""
        has_store = bool(settings.cache_path) and settings.cache
        return cls(
            tools,
            deadline_s=settings.deadline_s,
            max_output_chars=settings.max_output_chars,
            cache=settings.cache,
            max_concurrent=settings.max_concurrent,
            num_retries=settings.num_retries,
            backoff_s=settings.backoff_s,
            max_calls_per_s=settings.max_calls_per_s,
            store=(
                ResultCache(settings.cache_path, must_exist=settings.replay) if has_store else None
            ),
            replay=settings.replay,
            environments=environments,
        )

    @property
    def tools(self) -> Mapping[str, Tool]:
        """The tools by name."""
        return self._tools

    def sessions(self, task: Task) -> Sessions:
        """Returns what the trajectories of one tree make their calls through; to be used in `async
        with`."""
        return (
            Sessions(self, task)
            if self._environments is None
            else self._environments.sessions(self, task)
        )

    async def call(self, call: ToolCall, task: Task, *, instead: Tool | None = None) -> Observation:
        """Returns the tool's result, or the error that the agent is to read.

        Args:
            instead: run this in the place of the tool of that name.

        Raises `ToolUnavailable` when the tool says that its service is down.
        """
        tool = self._tools.get(call.name)
        if tool is None:
            known = ", ".join(self._tools) or "none"
            return self._error(
                f"there is no tool '{call.name}' (there is:"
                f" {known}){nearest(call.name, self._tools)}"
            )
        usage = self._usage[tool.name]
        usage.num_calls += 1
        if call.problem is not None:
            usage.num_failures += 1
            return self._error(call.problem)
        tool = instead or tool
        try:
            if self._is_caching and tool.cacheable:
                observation = await self._cached(tool, call, task)
            else:
                observation = await self.execute(tool, call.body, task)
        except ToolUnavailable:
            usage.num_failures += 1
            raise
        usage.num_failures += observation.is_error
        return observation

    def take_metrics(self) -> dict[str, float]:
        """Returns calls, shares and mean latency per tool since the last take; no shares of tools
        without a call."""
        metrics: dict[str, float] = (
            {} if self._environments is None else self._environments.take_metrics()
        )
        for name, usage in self._usage.items():
            metrics[f"tools/{name}_calls"] = float(usage.num_calls)
            if usage.num_calls:
                metrics[f"tools/{name}_failure_frac"] = usage.num_failures / usage.num_calls
                metrics[f"time/tool_{name}_cached_frac"] = usage.num_cached / usage.num_calls
            if usage.num_runs:
                metrics[f"time/tool_{name}_s"] = usage.latency_s / usage.num_runs
            if usage.num_retries:
                metrics[f"time/tool_{name}_retries"] = float(usage.num_retries)
            self._usage[name] = _Usage()
        return metrics

    async def close(self) -> None:
        """Cancels what still runs and closes every tool; one that fails or hangs there is logged
        and left behind."""
        waiting = [*self._running.values(), *self._left_behind]
        for run in waiting:
            run.cancel()
        if waiting:
            await asyncio.wait(waiting, timeout=min(1.0, self._deadline_s))
        for tool in self._tools.values():
            try:
                await asyncio.wait_for(tool.close(), self._deadline_s)
            except Exception as error:
                _log.warning(
                    "tool '%s' did not close: %s: %s", tool.name, type(error).__name__, error
                )
        if self._store is not None:
            self._store.close()

    async def _cached(self, tool: Tool, call: ToolCall, task: Task) -> Observation:
        key = (tool.name, call.body)
        usage = self._usage[tool.name]
        if key in self._cache:
            usage.num_cached += 1
            return self._cache[key]
        run = self._running.get(key)
        if run is None or run.get_loop() is not asyncio.get_running_loop():
            run = asyncio.create_task(self._stored(tool, call.body, task))
            self._running[key] = run
            run.add_done_callback(lambda done: self._keep(key, done))
        else:
            usage.num_cached += 1
        # Shielded: a caller that gives up leaves the run to the others, and to its deadline.
        return await asyncio.shield(run)

    def _keep(self, key: _Key, run: asyncio.Task[Observation]) -> None:
        if self._running.get(key) is run:
            del self._running[key]
        if run.cancelled() or run.exception() is not None or run.result().is_error:
            return
        self._cache[key] = run.result()
        if len(self._cache) > CACHE_ENTRIES:
            del self._cache[next(iter(self._cache))]

    async def _stored(self, tool: Tool, body: str, task: Task) -> Observation:
        """Returns the observation from disk, else from a run."""
        if self._store is None or not getattr(tool, "fingerprint", None):
            return await self.execute(tool, body, task)
        try:
            text = await asyncio.to_thread(self._store.get, tool, body)
        except sqlite3.Error as error:
            _log.warning("the tool cache cannot be read: %s", error)
            text = None
        if text is not None:
            self._usage[tool.name].num_cached += 1
            return self._observation(text, is_error=False)
        if self._is_replay:
            raise ToolUnavailable(
                f"replay: '{self._store.path}' holds no result of this call of '{tool.name}'"
            )
        return await self.execute(tool, body, task)

    async def execute(self, tool: Tool, body: str, task: Task) -> Observation:
        """Returns the observation of one run of a tool of this name, at the latest when the
        deadline is over; counts no call."""
        await self._wait_turn(tool)
        async with self._semaphore():
            started = time.perf_counter()
            run = asyncio.create_task(
                self._try(tool, body, task, time.monotonic() + self._deadline_s)
            )
            try:
                await asyncio.wait({run}, timeout=self._deadline_s)
            finally:
                usage = self._usage[tool.name]
                usage.num_runs += 1
                usage.latency_s += time.perf_counter() - started
                if not run.done():
                    self._leave_behind(run)
            if not run.done():
                return self._error(f"the call timed out after {self._deadline_s:g} s")
            return run.result()

    async def _try(self, tool: Tool, body: str, task: Task, deadline: float) -> Observation:
        """Returns the observation of the first try that the service did not fail, waiting longer
        each time."""
        num_retries = self._num_retries if _is_remote(tool) else 0
        for attempt in range(num_retries + 1):
            try:
                return await self._run(tool, body, task)
            except ToolUnavailable:
                pause_s = self._backoff_s * 2**attempt
                # A service that is down must not pass for an agent that asked for too much.
                if attempt == num_retries or time.monotonic() + pause_s >= deadline:
                    raise
            await asyncio.sleep(pause_s)
            self._usage[tool.name].num_retries += 1
            await self._wait_turn(tool)
        raise AssertionError("the last try returns or raises")

    async def _wait_turn(self, tool: Tool) -> None:
        if not self._interval_s or not _is_remote(tool):
            return
        now = time.monotonic()
        turn = max(now, self._next_start.get(tool.name, now))
        self._next_start[tool.name] = turn + self._interval_s
        await asyncio.sleep(turn - now)

    async def _run(self, tool: Tool, body: str, task: Task) -> Observation:
        try:
            # A tool of the user's may be a plain function behind the protocol.
            result: Any = tool(body, task)
            if inspect.isawaitable(result):
                result = await result
            text = as_text(result)
            await self._keep_on_disk(tool, body, text)
            return self._observation(text, is_error=False)
        except ToolUnavailable:
            raise
        except ToolError as error:
            return self._error(str(error) or "the call failed")
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            return self._error("the tool cancelled the call")
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # a panic of a library in Rust is no Exception
            return self._error(describe(error))

    async def _keep_on_disk(self, tool: Tool, body: str, text: str) -> None:
        is_kept = self._is_caching and tool.cacheable and bool(getattr(tool, "fingerprint", None))
        if self._store is None or not is_kept or len(text) > MAX_STORED_CHARS:
            return
        try:
            await asyncio.to_thread(self._store.put, tool, body, text)
        except sqlite3.Error as error:
            _log.warning("a result was not kept in the tool cache: %s", error)

    def _leave_behind(self, run: asyncio.Task[Observation]) -> None:
        """Cancels a run that nobody waits for; the set keeps it from being collected before it has
        ended."""
        run.cancel()
        self._left_behind.add(run)
        run.add_done_callback(self._forget)

    def _forget(self, run: asyncio.Task[Observation]) -> None:
        self._left_behind.discard(run)
        if not run.cancelled() and run.exception() is not None:
            _log.info("a tool call left behind ended with %s", describe(run.exception()))

    def _semaphore(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = (loop, asyncio.Semaphore(self._max_concurrent))
        return self._slots[1]

    def _error(self, text: str) -> Observation:
        return self._observation(text, is_error=True)

    def _observation(self, text: str, *, is_error: bool) -> Observation:
        shown, is_truncated = _cut(text, self._max_output_chars)
        return Observation(text=shown, is_error=is_error, is_truncated=is_truncated)


def _is_remote(tool: Tool) -> bool:
    return bool(getattr(tool, "is_remote", False))


def _cut(text: str, max_chars: int) -> tuple[str, bool]:
    """Returns the text in at most `max_chars` characters, and whether that took a cut, which the
    text then says."""
    if len(text) <= max_chars:
        return text, False
    note = f"\n[output cut: {len(text)} characters]"
    if 2 * len(note) > max_chars:
        note = " [cut]"
    return text[: max_chars - len(note)] + note, True
