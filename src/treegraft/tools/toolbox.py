"""Runs the agents' tool calls: deadlines, output cap, cache, and failures as observations."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treegraft.errors import SettingError, ToolError, ToolUnavailable, nearest
from treegraft.interfaces import Tool
from treegraft.types import Observation, Task, ToolCall

CACHE_ENTRIES = 20_000
"""Results kept; beyond, the oldest go. They change costs only, never an observation."""

_log = logging.getLogger(__name__)
_Key = tuple[str, str]


@dataclass(slots=True)
class _Usage:
    """What one tool did since the metrics were last taken."""

    num_calls: int = 0
    num_failures: int = 0
    num_cached: int = 0
    num_runs: int = 0
    latency_s: float = 0.0


class Toolbox:
    """The tools of a run, called by name.

    Observations depend on the call alone, never on the cache or on timing (short of the deadline): `is_cached` stays
    False, since which of two equal calls comes first is a matter of luck; hits are counted in the metrics.
    """

    def __init__(
        self, tools: Sequence[Tool], *, deadline_s: float, max_output_chars: int, cache: bool, max_concurrent: int
    ) -> None:
        """Args:
        deadline_s: longest run of one call, in seconds, counted from its start and not from its place in the queue.
        max_output_chars: longest text of an observation, its note about the cut included.
        cache: answer repeated calls of cacheable tools from memory.
        max_concurrent: calls that run at once.

        Raises `SettingError` for two tools of one name.
        """
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            if tool.name in self._tools:
                raise SettingError(f"two tools are named '{tool.name}'; a name is the agent's tag and must be unique.")
            self._tools[tool.name] = tool
        self._deadline_s = deadline_s
        self._max_output_chars = max_output_chars
        self._is_caching = cache
        self._max_concurrent = max_concurrent
        self._cache: dict[_Key, Observation] = {}
        self._running: dict[_Key, asyncio.Task[Observation]] = {}
        self._left_behind: set[asyncio.Task[Any]] = set()
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._usage = {name: _Usage() for name in self._tools}

    @property
    def tools(self) -> Mapping[str, Tool]:
        """The tools by name."""
        return self._tools

    async def call(self, call: ToolCall, task: Task) -> Observation:
        """Returns the tool's result, or the error that the agent is to read.

        Raises `ToolUnavailable` when the tool says that its service is down.
        """
        tool = self._tools.get(call.name)
        if tool is None:
            known = ", ".join(self._tools) or "none"
            return self._error(f"there is no tool '{call.name}' (there is: {known}){nearest(call.name, self._tools)}")
        usage = self._usage[tool.name]
        usage.num_calls += 1
        if call.problem is not None:
            usage.num_failures += 1
            return self._error(call.problem)
        try:
            if self._is_caching and tool.cacheable:
                observation = await self._cached(tool, call, task)
            else:
                observation = await self._execute(tool, call.body, task)
        except ToolUnavailable:
            usage.num_failures += 1
            raise
        usage.num_failures += observation.is_error
        return observation

    def take_metrics(self) -> dict[str, float]:
        """Returns calls, shares and mean latency per tool since the last take; no shares of tools without a call."""
        metrics: dict[str, float] = {}
        for name, usage in self._usage.items():
            metrics[f"tools/{name}_calls"] = float(usage.num_calls)
            if usage.num_calls:
                metrics[f"tools/{name}_failure_frac"] = usage.num_failures / usage.num_calls
                metrics[f"time/tool_{name}_cached_frac"] = usage.num_cached / usage.num_calls
            if usage.num_runs:
                metrics[f"time/tool_{name}_s"] = usage.latency_s / usage.num_runs
            self._usage[name] = _Usage()
        return metrics

    async def close(self) -> None:
        """Cancels what still runs and closes every tool; one that fails or hangs there is logged and left behind."""
        waiting = [*self._running.values(), *self._left_behind]
        for run in waiting:
            run.cancel()
        if waiting:
            await asyncio.wait(waiting, timeout=min(1.0, self._deadline_s))
        for tool in self._tools.values():
            try:
                await asyncio.wait_for(tool.close(), self._deadline_s)
            except Exception as error:
                _log.warning("tool '%s' did not close: %s: %s", tool.name, type(error).__name__, error)

    async def _cached(self, tool: Tool, call: ToolCall, task: Task) -> Observation:
        key = (tool.name, call.body)
        usage = self._usage[tool.name]
        if key in self._cache:
            usage.num_cached += 1
            return self._cache[key]
        run = self._running.get(key)
        if run is None or run.get_loop() is not asyncio.get_running_loop():
            run = asyncio.create_task(self._execute(tool, call.body, task))
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

    async def _execute(self, tool: Tool, body: str, task: Task) -> Observation:
        """Returns the observation of one run, at the latest when the deadline is over."""
        async with self._semaphore():
            started = time.perf_counter()
            run = asyncio.create_task(self._run(tool, body, task))
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

    async def _run(self, tool: Tool, body: str, task: Task) -> Observation:
        try:
            # A tool of the user's may be a plain function behind the protocol.
            result: Any = tool(body, task)
            if inspect.isawaitable(result):
                result = await result
            return self._observation(_as_text(result), is_error=False)
        except ToolUnavailable:
            raise
        except ToolError as error:
            return self._error(str(error) or "the call failed")
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            return self._error("the tool cancelled the call")
        except (Exception, SystemExit) as error:
            return self._error(_describe(error))

    def _leave_behind(self, run: asyncio.Task[Observation]) -> None:
        """Cancels a run that nobody waits for; the set keeps it from being collected before it has ended."""
        run.cancel()
        self._left_behind.add(run)
        run.add_done_callback(self._forget)

    def _forget(self, run: asyncio.Task[Observation]) -> None:
        self._left_behind.discard(run)
        if not run.cancelled() and run.exception() is not None:
            _log.info("a tool call left behind ended with %s", _describe(run.exception()))

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


def _cut(text: str, max_chars: int) -> tuple[str, bool]:
    """Returns the text in at most `max_chars` characters, and whether that took a cut, which the text then says."""
    if len(text) <= max_chars:
        return text, False
    note = f"\n[output cut: {len(text)} characters]"
    if 2 * len(note) > max_chars:
        note = " [cut]"
    return text[: max_chars - len(note)] + note, True


def _as_text(result: Any) -> str:
    if isinstance(result, str):
        return result
    if isinstance(result, bytes | bytearray | memoryview):
        return bytes(result).decode("utf-8", errors="replace")
    return str(result)


def _describe(error: BaseException | None) -> str:
    try:
        message = str(error)
    except Exception:
        message = ""
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
