"""The python tool in CPython with NumPy, SciPy and SymPy, each call in a bubblewrap sandbox.

As in Monty's the clock is fixed at `FROZEN_TIME`, sleeping takes no time and `random` and NumPy
start from one seed, so that the same code gives the same output, except for randomness from the
kernel (`os.urandom`) and memory addresses. Warnings are off, as they would cost the agent tokens at
each call.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from concurrent.futures import ThreadPoolExecutor

from treegraft.core.errors import SettingError, ToolError
from treegraft.core.interfaces import Capability, Signature
from treegraft.core.types import Task
from treegraft.settings.tools import PythonToolSettings
from treegraft.tools.python.bwrap import Outcome, Sandbox, SandboxLimits, find_problem
from treegraft.tools.python.output import MAX_OUTPUT_CHARS, NO_OUTPUT, too_large, too_long


class BwrapTool:
    """Runs Python code, each call in a fresh process of a sandbox started ahead."""

    name = "python"
    description = (
        "Runs Python code and shows what it prints and the value of its last expression. Each call"
        " starts afresh: names do not carry over. numpy, scipy and sympy can be imported; there is"
        " no network, and files last for one call."
    )
    signature = Signature.of_text("code", "Python code.")
    capability = Capability.STATELESS
    cacheable = True

    def __init__(self, settings: PythonToolSettings) -> None:
        """Tries a first sandbox, then starts the workers, which load their libraries in the
        background.

        Raises `SettingError` where no sandbox can be started, saying what to do.
        """
        self.limits = SandboxLimits(
            max_duration_s=settings.max_duration_s,
            max_memory_mb=settings.max_memory_mb or 512,
            max_files_mb=settings.max_files_mb,
            max_threads=settings.max_threads,
            max_output_chars=MAX_OUTPUT_CHARS,
        )
        self.num_workers = settings.num_workers
        problem = find_problem()
        if problem is not None:
            raise SettingError(f"tools.python.backend is 'bwrap', but {problem}")
        self._lock = threading.Lock()
        self._pool: _Pool | None = None
        self._start()

    @property
    def fingerprint(self) -> str:
        """Changes with everything that results depend on beside the code."""
        return f"bwrap {self.limits}"

    async def __call__(self, body: str, task: Task) -> str:
        """Returns the printed text and the value of the last expression.

        Raises `ToolError` for code that fails, runs too long, needs too much memory or ends its
        process, and when its sandbox dies; `ToolUnavailable` when no sandbox can be started.
        """
        pool = self._start()
        outcome = await asyncio.get_running_loop().run_in_executor(pool.threads, pool.run, body)
        if outcome.kind == "value":
            return (outcome.printed + outcome.text).rstrip("\n") or NO_OUTPUT
        if outcome.kind == "timeout":
            raise ToolError(too_long(self.limits.max_duration_s))
        if outcome.kind == "memory":
            raise ToolError(too_large(self.limits.max_memory_mb))
        if outcome.kind == "died":
            raise ToolError(f"the code was stopped: its process died ({outcome.text})")
        raise ToolError(outcome.printed + outcome.text)

    async def close(self) -> None:
        """Ends all sandboxes, once the calls under way are done. A later call starts new ones."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            await asyncio.to_thread(pool.close)

    def _start(self) -> _Pool:
        with self._lock:
            if self._pool is None:
                self._pool = _Pool(self.limits, self.num_workers)
            return self._pool


class _Pool:
    """Sandboxes and as many threads, which wait for them."""

    def __init__(self, limits: SandboxLimits, num_workers: int) -> None:
        self._limits = limits
        # None: a sandbox that is still to be started, or to be started again.
        self._idle: queue.SimpleQueue[Sandbox | None] = queue.SimpleQueue()
        self._num_workers = num_workers
        self.threads = ThreadPoolExecutor(num_workers, thread_name_prefix="treegraft-python")
        for _ in range(num_workers):
            self._idle.put(None)
            self.threads.submit(self._warm)

    def run(self, code: str) -> Outcome:
        """Returns the outcome of `code`; raises `ToolUnavailable` when no sandbox starts."""
        sandbox = self._idle.get()
        try:
            if sandbox is None or not sandbox.is_alive:
                sandbox = None
                sandbox = Sandbox(self._limits)
            return sandbox.run(code)
        finally:
            self._idle.put(sandbox)

    def close(self) -> None:
        """Ends the sandboxes once the calls under way are done."""
        self.threads.shutdown(cancel_futures=True)
        for _ in range(self._num_workers):
            sandbox = self._idle.get()
            if sandbox is not None:
                sandbox.close()

    def _warm(self) -> None:
        sandbox = self._idle.get()
        try:
            sandbox = sandbox or Sandbox(self._limits)
        finally:
            # The first call tries again and reports the failure.
            self._idle.put(sandbox)
