"""Interrupts: signals and code that ask a run to stop, and waits that report what they wait
for."""

from __future__ import annotations

import contextvars
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

# Imported where a loop runs: the list of commands does not wait for it.
if TYPE_CHECKING:
    from concurrent.futures import Future

LOOK_S = 0.5
"""Time between two looks at work in another thread. A signal that arrives just before a wait begins
does not end it."""
HEARTBEAT_S = 60.0
"""A wait this long says what it is waiting for, and again after as long."""
OTHERS: Sequence[int] = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)
)
"""Signals that ask for an end as Ctrl-C does: of a scheduler or service manager, of a terminal that
closes, of a scheduler before its time limit."""
Result = TypeVar("Result")


class Interrupted(Exception):
    """A stop was asked for."""


class Ended(KeyboardInterrupt):
    """A signal has ended the work. `number` is the signal, SIGINT for Ctrl-C."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def exit_status(error: BaseException) -> int | None:
    """Returns 128 + the signal that ended the work, as a shell does; None where the exception has
    another cause. 130 is Ctrl-C, 143 SIGTERM, 129 SIGHUP, 138 SIGUSR1."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, KeyboardInterrupt):
            return 128 + (found.number if isinstance(found, Ended) else signal.SIGINT)
        found = found.__cause__ or found.__context__
    return None


@contextmanager
def _handling(
    numbers: Sequence[int], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    # Python lets only the main thread set handlers, and signals reach no other; elsewhere the
    # caller requests stops.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # One that is ignored stays so: `nohup` wants that. None is a handler not set from Python.
    taken = [one for one in numbers if signal.getsignal(one) not in (signal.SIG_IGN, None)]
    if signal.SIGINT in numbers and signal.SIGINT not in taken:
        # A script's `&` has it ignored without anybody's wish.
        taken.append(signal.SIGINT)
    # Handlers nest: a run within a command has both.
    before = {one: signal.signal(one, handler) for one in taken}
    try:
        yield
    finally:
        for one, old in before.items():
            signal.signal(one, old)


_SWALLOWED: list[int] = []
"""The signal that `others_as_ctrl_c` got. Where its exception meets a callback of the garbage
collector, Python prints it and goes on; the next `Stop` then asks for the end."""


@contextmanager
def others_as_ctrl_c() -> Iterator[None]:
    """Lets SIGTERM, SIGHUP and SIGUSR1 do what Ctrl-C would do, for the time of the block.

    Raises:
        Ended: in place of a KeyboardInterrupt that one of them has caused.
    """
    got = _SWALLOWED
    got.clear()

    def on_signal(number: int, frame: FrameType | None) -> None:
        # A second one would break off what the first one has begun to end.
        if got:
            return
        got.append(number)
        handler = signal.getsignal(signal.SIGINT)
        # Typer turns an interrupt into an exit, whose cause has to tell the signal.
        if not callable(handler) or handler is signal.default_int_handler:
            raise Ended(number)
        handler(signal.SIGINT, frame)

    def on_lost(lost: sys.UnraisableHookArgs) -> None:
        if not isinstance(lost.exc_value, KeyboardInterrupt):
            hook(lost)
        elif not got:
            got.append(signal.SIGINT)

    hook = sys.unraisablehook
    sys.unraisablehook = on_lost
    with _handling(OTHERS, on_signal):
        try:
            yield
        except KeyboardInterrupt as error:
            if isinstance(error, Ended) or not got:
                raise
            raise Ended(got[0]) from error
        finally:
            got.clear()
            sys.unraisablehook = hook


class Stop:
    """A stop that has been asked for or not. The first signal asks; a second Ctrl-C raises Ended on
    the spot, and any other further signal changes nothing."""

    def __init__(self) -> None:
        self.is_asked = False
        self.number: int = signal.SIGINT
        """The first signal; SIGINT where code asked."""
        self._num_ctrl_c = 0
        self._is_shielded = False
        self._work: Future[Any] | None = None
        """What `wait` waits for."""

    def ask(self) -> None:
        """Asks to stop at the next safe point; from any thread or signal handler."""
        self.is_asked = True
        # A run that waits for its trees would see the flag only after them.
        if self._work is not None:
            # Also in the middle of a wait for it: a future's lock is reentrant.
            self._work.cancel()

    def raise_if_asked(self) -> None:
        """Raises Interrupted where a stop was asked for."""
        if self.is_asked:
            raise Interrupted

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """Lets no second Ctrl-C break into the block, which saves."""
        self._is_shielded = True
        try:
            yield
        finally:
            self._is_shielded = False

    @contextmanager
    def on_signals(self, announce: Callable[[str], None], doing: str, again: str) -> Iterator[None]:
        """Makes Ctrl-C and the `OTHERS` ask for a stop while the block runs.

        Args:
            announce: is called with a sentence about what happens.
            doing: what the process does after the first signal, for that sentence.
            again: what a second Ctrl-C does, for that sentence.
        """

        def say(text: str) -> None:
            # The terminal may be gone, or this very moment be in the middle of another line.
            with suppress(OSError, RuntimeError):
                announce(text)

        def on_signal(number: int, frame: FrameType | None) -> None:
            is_first = not self.is_asked
            is_ctrl_c = number == signal.SIGINT
            self._num_ctrl_c += is_ctrl_c
            # The exit code names the first signal, which is why the run ends.
            if is_first:
                self.number = number
                self.ask()
                name = signal.Signals(number).name
                say(f"{doing} ({again})" if is_ctrl_c else f"got {name}; {doing}")
            elif self._is_shielded and is_ctrl_c:
                say("a checkpoint is being written; the process ends after it")
            elif is_ctrl_c and self._num_ctrl_c > 1:
                raise Ended(number)

        # Not the event loop's handler, which waits while a warm-up or a backward pass runs.
        with _handling((signal.SIGINT, *OTHERS), on_signal):
            if _SWALLOWED:
                on_signal(_SWALLOWED[0], None)
            yield

    def wait(
        self, work: Future[Result], *, waits_on: object, on_heartbeat: Callable[[str], None]
    ) -> Result:
        """Returns the result of work in another thread.

        Args:
            waits_on: its text names what is being waited for; it may be empty.
            on_heartbeat: gets a sentence after each HEARTBEAT_S of waiting.

        Raises:
            Interrupted: a stop was asked for first; the work is cancelled.
        """
        from concurrent.futures import CancelledError

        began = said = time.monotonic()
        self._work = work
        if self.is_asked:
            work.cancel()
        try:
            while not work.done():
                with suppress(TimeoutError):
                    work.exception(LOOK_S)
                now = time.monotonic()
                if now - said >= HEARTBEAT_S:
                    said = now
                    waits = str(waits_on) or "nothing is waited for"
                    on_heartbeat(f"not finished after {now - began:.0f} s: {waits}")
            return work.result()
        except CancelledError:
            self.raise_if_asked()
            raise
        finally:
            self._work = None


@contextmanager
def ctrl_c_ends_at_once() -> Iterator[None]:
    """Lets Ctrl-C raise KeyboardInterrupt on the spot for the time of the block."""
    # An event loop's own handler cancels the task at its next wait, which a block that loads a
    # model does not have.
    with _handling((signal.SIGINT,), signal.default_int_handler):
        yield


def run_to_end(
    work: Coroutine[Any, Any, Result], *, on_interrupt: Callable[[], None] | None = None
) -> Result:
    """Returns the result of the coroutine, also if an event loop is running already, as in a
    notebook.

    Args:
        on_interrupt: called at Ctrl-C if the work runs in another thread; the function then
            waits for the work's end.

    Raises:
        KeyboardInterrupt: Ctrl-C, or (Ended) one of the `OTHERS`, has ended the work.
    """
    import asyncio
    from concurrent.futures import Future

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        # asyncio turns Ctrl-C into a cancellation, and SIGTERM into nothing.
        with others_as_ctrl_c():
            return asyncio.run(work)
    # asyncio.run refuses a thread whose loop runs already, so the work gets a thread of its own.
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(asyncio.run(work))
        except BaseException as error:  # handed over to the caller, whatever it is
            outcome.set_exception(error)

    # Names of given objects lead to them within their context alone.
    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), name="treegraft-run", daemon=True).start()
    with others_as_ctrl_c():
        try:
            return outcome.result()
        except KeyboardInterrupt:
            if on_interrupt is None or outcome.done():
                raise
            on_interrupt()
            return outcome.result()
