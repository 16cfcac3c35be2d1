"""What callers hand to the engine's thread, and how it answers them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from treegraft.core.interfaces import Request
from treegraft.policy.engine.blocks import Row


@dataclass(eq=False)
class LiveRequest:
    """A request on its way through the engine thread."""

    request: Request
    """Its `on_probe` may be called from any thread."""
    settle: Callable[[object], None]
    """Takes the completion or the exception; from any thread."""
    row: Row | None = None
    is_cancelled: bool = False
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)


@dataclass(eq=False)
class Order:
    """A call for the engine thread: when nothing is running (publish) or at once (forget)."""

    act: Callable[[], None]
    settle: Callable[[object], None]
    waits_for_idle: bool


def post(loop: asyncio.AbstractEventLoop, act: Callable[..., None], *values: object) -> None:
    """Calls `act` on the event loop, from any thread; a closed loop has no caller left to tell."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(act, *values)


def settler(future: asyncio.Future[Any]) -> Callable[[object], None]:
    """Returns the function by which another thread sets the future's result or exception."""

    def settle(result: object) -> None:
        # A caller that gave up has cancelled its future.
        if future.done():
            return
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)

    return functools.partial(post, future.get_loop(), settle)
