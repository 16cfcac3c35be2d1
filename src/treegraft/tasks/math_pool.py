"""A small pool of worker processes that compare mathematics, each killed and renewed when it runs
past its deadline.

math-verify's own time-out needs the main thread, and sympy can hang inside one C call; only a
process can be stopped. The workers are plain child processes on pipes, so nothing of the caller is
imported or copied.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

from treegraft.core.errors import DeadlineExceeded, TreegraftError

NUM_WORKERS = 2
"""Processes at most; they start when first needed."""
START_DEADLINE_S = 120.0
"""Longest wait for a worker to start or to become free, in seconds."""
WALL_FACTOR = 10.0
"""A deadline is processor time of the worker, so that a busy machine makes nothing wrong; the wait
may be this much longer."""
MEMORY_OF_VERDICTS = 8192
"""Pairs whose verdict is remembered, so that one pair has one verdict however busy the machine
is."""

_SCRIPT = Path(__file__).with_name("math_worker.py")


class _Worker:
    """One child process; not safe for two threads at once."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                str(_SCRIPT),
            ],  # -P: this folder has modules named like packages (datasets)
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )
        try:
            word = self._read_word(START_DEADLINE_S)
        except BaseException:
            self.kill()
            raise
        if word != "ready":
            self.kill()
            raise TreegraftError(
                "the worker process that compares mathematics did not start. Expected math-verify"
                f" in this environment; check it with: {sys.executable} -c 'import math_verify'"
            )

    def ask(self, prediction: str, reference: str, deadline_s: float) -> str | None:
        """Returns the worker's verdict; None when it ran past the deadline or died: it is then of
        no more use."""
        stdin = self.process.stdin
        assert stdin is not None
        request = (
            json.dumps([prediction, reference, deadline_s, WALL_FACTOR * deadline_s + 1.0]) + "\n"
        )
        try:
            stdin.write(request.encode())
            stdin.flush()
        except OSError:
            return None
        return self._read_word(WALL_FACTOR * deadline_s) or None

    def kill(self) -> None:
        """Ends the process and waits for its end."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def _read_word(self, deadline_s: float) -> str:
        """Returns one line without its end; empty when the deadline passed or the process ended."""
        stdout = self.process.stdout
        assert stdout is not None
        end = time.monotonic() + deadline_s
        word = b""
        while not word.endswith(b"\n"):
            poll = select.poll()
            poll.register(stdout, select.POLLIN | select.POLLHUP)
            if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
                return ""
            data = os.read(stdout.fileno(), 64)
            if not data:
                return ""
            word += data
        return word.decode().strip()


class MathPool:
    """Compares mathematics in child processes; safe for many threads."""

    def __init__(self, num_workers: int = NUM_WORKERS) -> None:
        self._lock = threading.Lock()
        self._verdicts: dict[tuple[str, str, float], str | None] = {}
        self._workers: set[_Worker] = set()
        # None stands for a place whose worker has not been started.
        self._free: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(num_workers):
            self._free.put(None)

    def compare(self, prediction: str, reference: str, deadline_s: float) -> str | None:
        """Returns "equal", "different" or "unparsed"; None when no verdict came within `deadline_s`
        processor seconds.

        Raises:
            DeadlineExceeded: no worker became free.
            TreegraftError: a worker could not be started.
        """
        key = (prediction, reference, deadline_s)
        with self._lock:
            if key in self._verdicts:
                return self._verdicts[key]
        verdict = self._ask(prediction, reference, deadline_s)
        with self._lock:
            if len(self._verdicts) >= MEMORY_OF_VERDICTS:
                self._verdicts.pop(next(iter(self._verdicts)))
            # Another thread may have compared the same pair meanwhile; the first verdict stays.
            return self._verdicts.setdefault(key, verdict)

    def close(self) -> None:
        """Ends all workers; a later comparison starts new ones."""
        with self._lock:
            workers, self._workers = self._workers, set()
        for worker in workers:
            worker.kill()

    def release(self) -> None:
        """Lets go of the workers' pipes without ending them: for a forked child, whose parent owns
        them."""
        for worker in self._workers:
            for stream in (worker.process.stdin, worker.process.stdout):
                if stream is not None:
                    stream.close()

    def _ask(self, prediction: str, reference: str, deadline_s: float) -> str | None:
        try:
            place = self._free.get(timeout=START_DEADLINE_S)
        except queue.Empty:
            raise DeadlineExceeded(
                f"no worker that compares mathematics became free within {START_DEADLINE_S:.0f} s"
            ) from None
        keep: _Worker | None = None
        worker: _Worker | None = None
        try:
            worker = place if place is not None and place.process.poll() is None else self._start()
            verdict = worker.ask(prediction, reference, deadline_s)
            if verdict is not None:
                keep = worker
            return verdict
        finally:
            if worker is not None and keep is None:
                with self._lock:
                    self._workers.discard(worker)
                worker.kill()
            self._free.put(keep)

    def _start(self) -> _Worker:
        worker = _Worker()
        with self._lock:
            self._workers = {other for other in self._workers if other.process.poll() is None} | {
                worker
            }
        return worker


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
