"""The python tool without its sandbox: threads that wait for workers."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor

from treegraft import Task
from treegraft.parts import interfaces


class PooledPython(ABC):
    """Runs Python code, each call in a fresh session of one of `num_workers` workers."""

    name = "python"
    description = (
        "Runs Python code and shows what it prints and the value of its last expression. Each call"
        " starts afresh: names do not carry over."
    )
    signature = interfaces.Signature.of_text("code", "Python code.")
    capability = interfaces.Capability.STATELESS
    cacheable = True

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._threads: ThreadPoolExecutor | None = None

    async def __call__(self, body: str, task: Task) -> str:
        """Returns the printed text and the value of the last expression.

        Raises `ToolError` for code that fails, runs too long, needs too much memory or ends its
        process, and when its worker dies; `ToolUnavailable` when no worker can be started.
        """
        return await asyncio.get_running_loop().run_in_executor(self._start(), self._run, body)

    def _start(self) -> ThreadPoolExecutor:
        if self._threads is None:
            # Not the event loop's own threads: slow code would block those.
            threads = ThreadPoolExecutor(self._num_workers, thread_name_prefix="treegraft-python")
            self._open(threads)
            self._threads = threads
        return self._threads

    async def close(self) -> None:
        """Ends all workers, once the calls under way are done. A later call starts new ones."""
        threads = self._threads
        self._threads = None
        if threads is not None:
            await asyncio.to_thread(threads.shutdown, cancel_futures=True)
            await asyncio.to_thread(self._end)

    @abstractmethod
    def _open(self, threads: ThreadPoolExecutor) -> None:
        """Makes the workers; `threads` may start them in the background."""

    @abstractmethod
    def _run(self, code: str) -> str:
        """Returns and raises as a call does; runs in one of the threads."""

    @abstractmethod
    def _end(self) -> None: ...
