"""The clock of an update: how many seconds each of its parts took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Seconds of the parts of an update."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        # Of all threads: a busy machine stretches seconds, not these.
        self._cpu_began = time.process_time()
        self._parts: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Adds the time of the block to a part."""
        began = time.monotonic()
        yield
        self._parts[part] = self._parts.get(part, 0.0) + time.monotonic() - began

    def take_metrics(self) -> dict[str, float]:
        """Returns time/PART_s of each part, and time/update_s and time/cpu_s since the start."""
        metrics = {f"time/{part}_s": seconds for part, seconds in self._parts.items()}
        metrics["time/update_s"] = time.monotonic() - self._began
        metrics["time/cpu_s"] = time.process_time() - self._cpu_began
        return metrics
