"""Adds traces until it is killed, and says after each `add` how many are committed: python -m
tests.support.killed_adds BUFFER"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import count

from treegraft.core.types import Trace
from treegraft.traces import buffer as module
from treegraft.traces.buffer import TraceBuffer

CHUNK = 8
"""Smaller than in earnest, so that more kills hit a commit."""


def endless(start: int = 0) -> Iterator[Trace]:
    """Gives different traces, always the same ones in the same order."""
    for number in count(start):
        key = f"r{number % 8} of e{number} ?\nsearch e{number} r{number % 8}"
        yield Trace(
            key,
            f"value {number}" * 20,
            1.0,
            "expert",
            f"task {number // 4}",
            number % 4,
            False,
            "first",
        )


def main() -> None:
    """Goes on where the buffer ends."""
    module.CHUNK = CHUNK
    with TraceBuffer(sys.argv[1], "hashing") as buffer:
        source = endless(len(buffer))
        while True:
            buffer.add([next(source) for _ in range(2 * CHUNK)])
            print(len(buffer), flush=True)


if __name__ == "__main__":
    main()
