"""Compares mathematics in a small pool of child processes.

math-verify's own time-out needs the main thread, and sympy can hang inside one C call.
"""

from __future__ import annotations

import atexit
import os
import threading
from pathlib import Path

from treegraft.core.workers import WorkerPool

NUM_WORKERS = 2
"""Processes at most; they start when first needed."""
WALL_FACTOR = 10.0
"""A deadline is processor time of the worker, so that a busy machine makes nothing wrong; the wait
may be this much longer."""
MEMORY_OF_VERDICTS = 8192
"""Pairs whose verdict is remembered, so that one pair has one verdict however busy the machine
is."""


class MathPool(WorkerPool):
    """Compares mathematics in child processes; safe for many threads."""

    def __init__(self, num_workers: int = NUM_WORKERS) -> None:
        script = Path(__file__).with_name("math_worker.py")
        super().__init__(script, num_workers, task="compares mathematics", package="math_verify")
        self._remembering = threading.Lock()
        self._verdicts: dict[tuple[str, str, float], str | None] = {}

    def compare(self, prediction: str, reference: str, deadline_s: float) -> str | None:
        """Returns "equal", "different" or "unparsed"; None when no verdict came within `deadline_s`
        processor seconds.

        Raises:
            DeadlineExceeded: no worker became free.
            TreegraftError: a worker could not be started.
        """
        # With the deadline: a longer one may find what a shorter one did not.
        key = (prediction, reference, deadline_s)
        with self._remembering:
            if key in self._verdicts:
                return self._verdicts[key]
        verdict = self.ask([prediction, reference], WALL_FACTOR * deadline_s, cpu_s=deadline_s)
        with self._remembering:
            if len(self._verdicts) >= MEMORY_OF_VERDICTS:
                self._verdicts.pop(next(iter(self._verdicts)))
            # Another thread may have compared the same pair meanwhile; the first verdict stays.
            return self._verdicts.setdefault(key, verdict)


_pool = MathPool()
_pools_of_parents: list[MathPool] = []
"""Kept so that a forked child does not warn of processes that are its parent's."""


def shared_pool() -> MathPool:
    """Returns this process's pool."""
    return _pool


def _forget_parents_pool() -> None:
    # Two readers of one pipe would steal each other's answers, and a pipe held open here would keep
    # a worker alive.
    global _pool
    _pool.release()
    _pools_of_parents.append(_pool)
    _pool = MathPool()


@atexit.register
def _close_at_exit() -> None:
    _pool.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parents_pool)
