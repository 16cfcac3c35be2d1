"""What lives on an event loop of its own, interrupted while it opens."""

from __future__ import annotations

import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from treegraft.core.looped import Life


def test_ctrl_c_while_it_opens_leaves_it_closed() -> None:
    events: list[str] = []
    pressed = threading.Event()
    may_open = threading.Event()
    main = threading.get_ident()

    def once(*_: object) -> None:
        if not pressed.is_set():
            pressed.set()
            raise KeyboardInterrupt

    @asynccontextmanager
    async def held(name: str) -> AsyncIterator[None]:
        if name == "first":
            # Python may miss a signal at the moment when a wait begins.
            while not pressed.wait(0.01):
                signal.pthread_kill(main, signal.SIGINT)
            may_open.wait()
        events.append(f"{name} opened")
        yield
        events.append(f"{name} closed")

    async def seven() -> int:
        return 7

    life = Life("test")
    before = signal.signal(signal.SIGINT, once)
    try:
        with pytest.raises(KeyboardInterrupt):
            life.begin(held("first"))
        assert not life.is_open
        may_open.set()
        life.begin(held("second"))
        # The first has closed before the second opened: two models may not fit into the memory.
        assert events == ["first opened", "first closed", "second opened"]
        assert life.is_open and life.start(seven).result() == 7
        life.end()
        assert not life.is_open and events[3:] == ["second closed"]
    finally:
        signal.signal(signal.SIGINT, before)
