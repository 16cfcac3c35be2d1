"""Blocking calls off the event loop, in daemon threads: a call that hangs blocks neither the loop
nor the exit."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def run_in_thread(call: Callable[[], T]) -> T:
    """Returns the result of `call`, run in a daemon thread of its own.

    Raises the exception of `call`; as `RuntimeError` if it would end or confuse the event loop.
    """
    job, future = _job(call)
    threading.Thread(target=job, daemon=True, name="treegraft-tool").start()
    return await future


class OwnThread:
    """Runs calls one after another in one daemon thread, which starts with the first.

    For objects that must not be shared between threads, such as a database connection.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def run(self, call: Callable[[], T]) -> T:
        """Returns the result of `call`. Raises as `run_in_thread` does."""
        job, future = _job(call)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True, name=self._name)
            self._thread.start()
        self._jobs.put(job)
        return await future

    def end(self) -> None:
        """Ends the thread after the calls in its queue."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _job(call: Callable[[], T]) -> tuple[Callable[[], None], asyncio.Future[T]]:
    """A thread's work and the future of its outcome; to be called on the event loop."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = context.run(call)
        except StopIteration as error:
            failure = RuntimeError(f"StopIteration: {error}")
        except Exception as error:
            failure = error
        except BaseException as error:
            failure = RuntimeError(f"{type(error).__name__}: {error}")
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, result, failure)

    return work, future
