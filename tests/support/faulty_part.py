"""A part of `benchmarks.card` whose works fail in every way that those on a card can."""

from __future__ import annotations

import os
import signal
import time

import torch
from benchmarks.card.bench import Bench, Work


def works(bench: Bench) -> list[Work]:
    """Returns the works."""
    return [
        Work("good", lambda one: one.add("good", 1.0, "times")),
        Work("raises", _raises),
        Work("does not fit", does_not_fit),
        Work("hangs", _hangs, 6.0),
        Work("is killed", lambda _: os.kill(os.getpid(), signal.SIGSEGV)),
        Work("spoils", _spoils),
        Work("good again", lambda one: one.add("good again", 2.0, "times")),
        Work("hangs at the end", _hangs, 6.0),
    ]


def _raises(bench: Bench) -> None:
    bench.add("before it raises", 3.0, "times")
    raise ValueError("no such shape\nand more")


def does_not_fit(bench: Bench) -> None:
    """Raises what torch raises when the card is full."""
    raise torch.OutOfMemoryError("CUDA out of memory.\nmore")


def _hangs(bench: Bench) -> None:
    time.sleep(60.0)


def _spoils(bench: Bench) -> None:
    """As an illegal memory access does: every later use of the card fails too."""

    def fails() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    bench.wait = fails  # type: ignore[method-assign]
    bench.wait()
