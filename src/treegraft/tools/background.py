"""Tasks that are awaited up to a deadline; those that outlast it are cancelled and held."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any, TypeVar

from treegraft.core.text import describe

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Background:
    """Tasks that nobody awaits, held until they end."""

    def __init__(self) -> None:
        # The event loop has weak references only: without this set a task could be collected.
        self.tasks: set[asyncio.Future[Any]] = set()

    def hold(self, task: asyncio.Future[Any]) -> None:
        """Holds a task until it has ended, and logs its exception."""
        self.tasks.add(task)
        task.add_done_callback(self._forget)

    async def run(self, work: Awaitable[T], timeout_s: float) -> asyncio.Future[T]:
        """Returns the task of `work` once it is done, or after `timeout_s`: cancelled and held."""
        task = asyncio.ensure_future(work)
        try:
            # Not `wait_for`, which would wait for a task that ignores its cancellation.
            await asyncio.wait({task}, timeout=timeout_s)
        finally:
            # Also if this coroutine itself was cancelled.
            if not task.done():
                task.cancel()
                self.hold(task)
        return task

    def _forget(self, task: asyncio.Future[Any]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.info("a call that was left behind ended with %s", describe(task.exception()))
