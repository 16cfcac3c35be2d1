"""What lives on an event loop and is used from plain code as well as from coroutines."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, TypeVar

from treegraft.core.errors import SettingError

Result = TypeVar("Result")


class Life:
    """One opening of an asynchronous context: on the event loop that runs, or on that of a thread
    of its own, so that plain code can use it, also in a notebook."""

    def __init__(self, name: str) -> None:
        """Args: name: of what lives, for the thread and for errors."""
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._runner: threading.Thread | None = None

    @property
    def is_open(self) -> bool:
        return self._loop is not None

    @property
    def is_here(self) -> bool:
        """Whether its loop runs in the calling thread."""
        return self._thread == threading.get_ident()

    # ------------------------------------------------------------------ begin and end

    async def begin_here(self, held: AbstractAsyncContextManager[None]) -> None:
        """Opens it on the running loop."""
        self._held = held
        await held.__aenter__()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    async def end_here(self, *error: Any) -> None:
        """Closes it again."""
        self._loop = None
        await self._held.__aexit__(*error)

    def begin(self, held: AbstractAsyncContextManager[None]) -> None:
        """Opens it on a thread of its own."""
        if self._runner is not None and self._runner.is_alive():
            # One that was given up while it opened may still be loading: two might not fit.
            self._runner.join()
        opened: Future[tuple[asyncio.AbstractEventLoop, int]] = Future()
        closing: Future[None] = Future()
        ended: Future[None] = Future()
        # The functions below keep their own: a later opening replaces these.
        self._closing = closing
        self._ended = ended

        async def live() -> None:
            async with held:
                opened.set_result((asyncio.get_running_loop(), threading.get_ident()))
                await asyncio.wrap_future(closing)

        def run() -> None:
            try:
                asyncio.run(live())
                ended.set_result(None)
            except BaseException as error:  # handed over to the caller, whatever it is
                (ended if opened.done() else opened).set_exception(error)

        context = contextvars.copy_context()
        name = f"treegraft-{self._name}"
        self._runner = threading.Thread(target=context.run, args=(run,), name=name, daemon=True)
        try:
            self._runner.start()
            self._loop, self._thread = opened.result()
        except BaseException:
            # After Ctrl-C the thread closes what it is about to open.
            self._loop = None
            closing.set_result(None)
            raise

    def end(self) -> None:
        """Closes it and waits until that is done."""
        self._loop = None
        self._closing.set_result(None)
        self._ended.result()

    # ------------------------------------------------------------------ work

    def start(
        self, work: Callable[..., Coroutine[Any, Any, Result]], *given: Any
    ) -> Future[Result]:
        """Starts `work(*given)` on its loop, from any thread."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work(*given), self._loop)

    @contextmanager
    def working(
        self, work: Callable[..., Coroutine[Any, Any, Result]], *given: Any
    ) -> Iterator[Future[Result]]:
        """Starts `work(*given)` on its loop, from another thread; it has ended at the end of the
        block, cancelled if an error leaves the block."""
        # The block would hold up the very loop that does the work.
        if self.is_here:
            raise SettingError(
                f"{self._name}: this one lives on the event loop that runs here; await its methods"
                f" that begin with an a (asample, async_weights, aevaluate), or open it with"
                f" `with`.",
                code="session-on-this-loop",
            )
        ended = threading.Event()

        async def tracked() -> Result:
            try:
                return await work(*given)
            finally:
                ended.set()

        future = self.start(tracked)
        try:
            yield future
        except BaseException:
            if future.cancel():
                ended.wait()
            raise

    async def run(self, work: Callable[..., Coroutine[Any, Any, Result]], *given: Any) -> Result:
        """Returns the result of `work(*given)` on its loop, awaited on any other."""
        # Handed to the own loop and awaited here, it would wait for itself.
        if self.is_here:
            return await work(*given)
        return await asyncio.wrap_future(self.start(work, *given))
