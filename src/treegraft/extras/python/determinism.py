"""Fixed clock and random seeds of the sandboxes, so that the same code gives the same output."""

from __future__ import annotations

import datetime
import random
import sys
import time
from collections.abc import Callable
from typing import Any

FROZEN_TIME = datetime.datetime(2025, 1, 1, tzinfo=datetime.UTC)
"""The time on the clocks of both sandboxes."""


class _FixedDatetime(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> _FixedDatetime:
        return cls.fromtimestamp(FROZEN_TIME.timestamp(), tz)

    @classmethod
    def utcnow(cls) -> _FixedDatetime:
        return cls.now(datetime.UTC).replace(tzinfo=None)

    @classmethod
    def today(cls) -> _FixedDatetime:
        return cls.now()

    def __repr__(self) -> str:
        return f"datetime.{super().__repr__()}"


class _FixedDate(datetime.date):
    @classmethod
    def today(cls) -> _FixedDate:
        return cls.fromtimestamp(FROZEN_TIME.timestamp())

    def __repr__(self) -> str:
        return f"datetime.{super().__repr__()}"


def fix_clock() -> None:
    """Fixes `time` and `datetime` of this process at `FROZEN_TIME`; sleeping takes no time.

    For the sandbox only: it patches the modules. Direct system calls (file times) are not covered.
    """
    import asyncio
    import threading  # noqa: F401

    # Imported above so that threads keep the real clock; event loops get it here, else nothing
    # would ever be due.
    running = time.monotonic
    asyncio.base_events.BaseEventLoop.time = lambda self: running()  # type: ignore[method-assign]
    seconds = FROZEN_TIME.timestamp()
    for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time"):
        setattr(time, name, lambda: seconds)
        setattr(time, f"{name}_ns", lambda: int(seconds) * 10**9)
    for name in ("gmtime", "localtime", "ctime"):
        setattr(time, name, _at(getattr(time, name), seconds))
    moment = time.gmtime(seconds)
    for name, position in (("asctime", 0), ("strftime", 1)):
        setattr(time, name, _filled(getattr(time, name), position, moment))
    time.sleep = lambda seconds: None
    _FixedDatetime.__name__ = _FixedDatetime.__qualname__ = "datetime"
    _FixedDate.__name__ = _FixedDate.__qualname__ = "date"
    _FixedDatetime.__module__ = _FixedDate.__module__ = "datetime"
    datetime.datetime = _FixedDatetime  # type: ignore[misc]
    datetime.date = _FixedDate  # type: ignore[misc]


def seed() -> None:
    """Seeds `random`, and NumPy where loaded; to be called in each child, since every forked
    process draws another seed.

    Randomness from the kernel (`os.urandom`, `secrets`) is not covered.
    """
    random.seed(0)
    if "numpy" in sys.modules:
        numpy: Any = sys.modules["numpy"]
        numpy.random.seed(0)
        # The source of default_rng()'s seed when none is given.
        numpy.random.bit_generator.randbits = random.Random(0).getrandbits


def _at(func: Callable[[float], Any], seconds: float) -> Callable[..., Any]:
    return lambda at=None: func(seconds if at is None else at)


def _filled(func: Callable[..., Any], position: int, moment: Any) -> Callable[..., Any]:
    return lambda *args: func(*args, *([moment] if len(args) <= position else []))
