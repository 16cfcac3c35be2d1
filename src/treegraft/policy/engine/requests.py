"""What callers hand to the engine's thread, and how it answers them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

from treegraft.core.interfaces import Request
from treegraft.core.types import Completion
from treegraft.policy.engine.blocks import Row


@dataclass(eq=False)
class LiveRequest:
    """A request on its way through the engine thread."""

    request: Request
    """Its `on_probe` may be called from any thread."""
    future: Future[Completion] = field(default_factory=Future)
    """Cancelled by a caller that gave up."""
    row: Row | None = None
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)


@dataclass(eq=False)
class Order:
    """A call for the engine thread, when nothing is running: a publish."""

    act: Callable[[], None]
    future: Future[None] = field(default_factory=Future)


def settle(future: Future[Any], result: object) -> None:
    """Answers with a result or an exception, unless the caller gave up."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)


def post(loop: asyncio.AbstractEventLoop, act: Callable[..., None], *values: object) -> None:
    """Calls `act` on the event loop, from any thread; a closed loop has no caller left to tell."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(act, *values)
