"""A stop that is asked for while work in another thread is waited for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from treegraft.core import interrupt
from treegraft.core.interrupt import Interrupted, Stop
from treegraft.core.looped import Life


@asynccontextmanager
async def nothing() -> AsyncIterator[None]:
    yield


@pytest.mark.parametrize("is_early", [True, False], ids=["before the wait", "during the wait"])
def test_a_stop_ends_the_wait_and_the_work(is_early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a look in between, so that only the stop itself can end the wait.
    monkeypatch.setattr(interrupt, "LOOK_S", 60.0)
    life = Life("test")
    stop = Stop()
    ends: list[str] = []

    async def work(began: Callable[[], None]) -> None:
        try:
            began()
            await asyncio.sleep(5.0)
            ends.append("by itself")
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    def ask() -> None:
        threading.Timer(0.05, stop.ask).start()

    if is_early:
        stop.ask()
    life.begin(nothing())
    try:
        with (
            pytest.raises(Interrupted),
            life.working(work, (lambda: None) if is_early else ask) as future,
        ):
            stop.wait(future, waits_on="", on_heartbeat=print)
        assert ends == ["cancelled"]
    finally:
        life.end()
