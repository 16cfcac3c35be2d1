"""The python tool without its sandbox: workers that are started once, and threads that wait for
them."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from treegraft import Task
from treegraft.parts import interfaces

W = TypeVar("W")


class PooledPython(ABC, Generic[W]):
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
        self._lock = threading.Lock()
        self._pool: tuple[ThreadPoolExecutor, W] | None = None

    async def __call__(self, body: str, task: Task) -> str:
        """Returns the printed text and the value of the last expression.

        Raises `ToolError` for code that fails, runs too long, needs too much memory or ends its
        process, and when its worker dies; `ToolUnavailable` when no worker can be started.
        """
        threads, workers = self._start()
        return await asyncio.get_running_loop().run_in_executor(threads, self._run, workers, body)

    async def close(self) -> None:
        """Ends all workers, once the calls under way are done. A later call starts new ones."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            threads, workers = pool
            await asyncio.to_thread(threads.shutdown, cancel_futures=True)
            await asyncio.to_thread(self._end, workers)

    def _start(self) -> tuple[ThreadPoolExecutor, W]:
        with self._lock:
            if self._pool is None:
                # Not the event loop's own threads: slow code would hold those up.
                name = "treegraft-python"
                threads = ThreadPoolExecutor(self._num_workers, thread_name_prefix=name)
                self._pool = threads, self._open(threads)
            return self._pool

    @abstractmethod
    def _open(self, threads: ThreadPoolExecutor) -> W:
        """Returns the workers; `threads` may start them in the background."""

    @abstractmethod
    def _run(self, workers: W, code: str) -> str:
        """Returns and raises as a call does; runs in one of the threads."""

    @abstractmethod
    def _end(self, workers: W) -> None: ...
