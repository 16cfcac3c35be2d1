"""Interrupts: Ctrl-C, stops requested by code, and waits that report their owner."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

HEARTBEAT_S = 60.0
"""A wait this long says what it is waiting for, and again after as long."""
Result = TypeVar("Result")


class Interrupted(Exception):
    """A stop was asked for."""


@contextmanager
def _on_sigint(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    # Python lets only the main thread set handlers, and signals reach no other; elsewhere the
    # caller asks for stops.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Stop:
    """A stop that has been asked for or not. The first Ctrl-C asks; the second raises
    KeyboardInterrupt on the spot."""

    def __init__(self) -> None:
        self.is_asked = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._event = asyncio.Event()

    def ask(self) -> None:
        """Asks to stop at the next safe point; from any thread or signal handler."""
        self.is_asked = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._event.set)

    def raise_if_asked(self) -> None:
        """Raises Interrupted where a stop was asked for."""
        if self.is_asked:
            raise Interrupted

    @contextmanager
    def on_ctrl_c(self, announce: Callable[[], None]) -> Iterator[None]:
        """Lets Ctrl-C ask for the time of the block, which runs on an event loop."""
        self._loop = asyncio.get_running_loop()
        if self.is_asked:
            self._event.set()

        def on_signal(number: int, frame: FrameType | None) -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self.ask()
            announce()

        # Not the event loop's handler, which waits while a warm-up or a backward pass runs.
        with _on_sigint(on_signal):
            yield

    async def interruptible(
        self,
        work: Coroutine[Any, Any, Result],
        *,
        waits_on: object,
        on_heartbeat: Callable[[str], None],
    ) -> Result:
        """Returns the result of the work.

        Args:
            waits_on: its text names what is being waited for; it may be empty.
            on_heartbeat: gets a sentence after each HEARTBEAT_S of waiting.

        Raises:
            Interrupted: a stop was asked for first; the work is cancelled.
        """
        task, stop = asyncio.create_task(work), asyncio.create_task(self._event.wait())
        began = time.monotonic()
        try:
            while not (
                await asyncio.wait(
                    {task, stop}, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED
                )
            )[0]:
                waits = str(waits_on) or "nothing is waited for"
                on_heartbeat(f"not finished after {time.monotonic() - began:.0f} s: {waits}")
            # Work that ended together with the request is not thrown away.
            if task.done():
                return task.result()
            raise Interrupted
        finally:
            for one in (task, stop):
                one.cancel()
            await asyncio.wait({task, stop})


@contextmanager
def ctrl_c_ends_at_once() -> Iterator[None]:
    """Lets Ctrl-C raise KeyboardInterrupt on the spot for the time of the block."""
    # An event loop's own handler cancels the task at its next wait, which a block that loads a
    # model does not have.
    with _on_sigint(signal.default_int_handler):
        yield


def run_to_end(
    work: Coroutine[Any, Any, Result], *, on_interrupt: Callable[[], None] | None = None
) -> Result:
    """Returns the result of the coroutine, also where an event loop is running already (a
    notebook).

    Args:
        on_interrupt: called at Ctrl-C where the work runs in another thread; the work's end is
            waited for.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    # asyncio.run refuses a thread whose loop runs already, so the work gets a thread of its own.
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(asyncio.run(work))
        except BaseException as error:  # handed over to the caller, whatever it is
            outcome.set_exception(error)

    threading.Thread(target=run, name="treegraft-run", daemon=True).start()
    try:
        return outcome.result()
    except KeyboardInterrupt:
        if on_interrupt is None or outcome.done():
            raise
        on_interrupt()
        return outcome.result()
