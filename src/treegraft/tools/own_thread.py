"""Blocking calls off the event loop, in daemon threads: a call that hangs blocks neither the loop
nor the exit."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import queue
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from treegraft.core.text import describe
from treegraft.core.threads import release_threads

T = TypeVar("T")
Job = Callable[[], None]

MAX_IDLE = 64
"""Threads that wait for further calls."""
_idle: list[queue.SimpleQueue[Job]] = []
"""The queues of threads without a call, the one that became idle last at the end."""
if hasattr(os, "register_at_fork"):
    # A forked process has none of these threads.
    os.register_at_fork(after_in_child=_idle.clear)


async def run_in_thread(call: Callable[[], T]) -> T:
    """Returns the result of `call`, which runs in a daemon thread that no other call uses
    meanwhile.

    Raises the exception of `call`, or a `RuntimeError` if that exception would end or confuse the
    event loop.
    """
    job, future = _job(call)
    try:
        _idle.pop().put(job)
    except IndexError:
        # A start waits until the new thread runs, milliseconds while an engine is at work.
        threading.Thread(target=_serve, args=(job,), daemon=True, name="treegraft-tool").start()
    return await future


def _serve(job: Job) -> None:
    """Runs a job, and then those that arrive, unless enough threads wait already."""
    jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
    while True:
        job()
        # What the call held must not live until the next one.
        del job
        if "torch" in sys.modules:
            release_threads()
        if len(_idle) >= MAX_IDLE:
            return
        _idle.append(jobs)
        job = jobs.get()


async def run_either(
    func: Callable[..., Any],
    call: Callable[[], Any],
    run_blocking: Callable[[Callable[[], Any]], Awaitable[Any]] = run_in_thread,
) -> Any:
    """Returns the result of `call`, which calls `func`: on the event loop where `func` is async,
    else through `run_blocking`."""
    result = call() if inspect.iscoroutinefunction(func) else await run_blocking(call)
    # A plain function may still return an awaitable.
    return await result if inspect.isawaitable(result) else result


class OwnThread:
    """Runs calls one after another in one daemon thread, which starts with the first.

    For objects that must not be shared between threads, such as a database connection.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._num_users = 1
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def run(self, call: Callable[[], T]) -> T:
        """Returns the result of `call`. Raises as `run_in_thread` does."""
        job, future = _job(call)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True, name=self._name)
            self._thread.start()
        self._jobs.put(job)
        return await future

    def shared(self) -> OwnThread:
        """Returns this thread for one more user."""
        self._num_users += 1
        return self

    def end(self) -> None:
        """Ends the thread after the calls in its queue, once each user has called this."""
        # The copies of an object that forks share its thread.
        self._num_users -= 1
        if not self._num_users:
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _job(call: Callable[[], T]) -> tuple[Job, asyncio.Future[T]]:
    """A thread's work and the future of its outcome; to be called on the event loop."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    # Given objects and counts are found by it.
    context = contextvars.copy_context()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():  # its caller has given up
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
        except BaseException as error:
            failure = error
            # A future refuses StopIteration, and an exit would end the event loop.
            if isinstance(error, StopIteration) or not isinstance(error, Exception):
                failure = RuntimeError(describe(error))
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, result, failure)

    return work, future
