"""Worker processes: one job each at a time, ended together with the process that started them."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

from treegraft import TreegraftError
from treegraft.parts import plain

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
PORTABLE = {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default"}
"""Environment in which MKL and torch take the same path on every x86 processor; read when they are
loaded."""
END_S = 120.0
"""How long a worker may take to save and end."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended: Outcome(job, {"curve": [...]})."""

    job: Any
    result: Any = None
    error: str = ""
    """What it failed with; "" where it did not."""


class Pool:
    """Processes that call one function with one job after another.

    Each is a fresh interpreter at one thread. A terminal's Ctrl-C does not reach them: the process
    that started them decides, see `end`.
    """

    def __init__(
        self, function: Callable[..., Any], num: int, environment: Mapping[str, str] | None = None
    ) -> None:
        """Args: environment: further variables of the processes; None for none."""
        self._function, self.num = function, num
        self._environment = dict.fromkeys(THREADS, "1") | dict(environment or {})
        self._workers: dict[Connection, Any] = {}
        self._jobs: dict[Connection, Any] = {}
        self._idle: list[Connection] = []

    @property
    def num_running(self) -> int:
        """Jobs under way."""
        return len(self._jobs)

    @property
    def has_room(self) -> bool:
        """Whether another job could begin at once."""
        return self.num_running < self.num

    def start(self, job: Any) -> None:
        """Begins a job."""
        while self._idle:
            connection = self._idle.pop()
            try:
                connection.send(job)
            except OSError:  # it was killed while it had no job
                self._workers.pop(connection).join()
            else:
                self._jobs[connection] = job
                return
        connection = self._hire()
        self._jobs[connection] = job
        connection.send(job)

    def _hire(self) -> Connection:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        worker = context.Process(target=_work, args=(theirs, self._function), daemon=True)
        before = {name: os.environ.get(name) for name in self._environment}
        # Its start would let SIGINT through.
        resource_tracker.ensure_running()
        # A worker that is still being loaded gets the signal when it can heed it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        # Read once, when the libraries of the new process are loaded.
        os.environ |= self._environment
        try:
            worker.start()
            self._workers[ours] = worker
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
            theirs.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return ours

    def outcomes(self) -> Iterator[Outcome]:
        """Waits for the end of a job or more, and yields how each ended."""
        return self._answers(None)

    def _answers(self, timeout_s: float | None) -> Iterator[Outcome]:
        for connection in wait(list(self._jobs), timeout_s):
            assert isinstance(connection, Connection)
            job = self._jobs.pop(connection)
            try:
                result, error = connection.recv()
            except (EOFError, ConnectionResetError):
                worker = self._workers.pop(connection)
                worker.join()
                status = worker.exitcode
                cause = (
                    f"signal {-status}, of the system where memory ran out"
                    if status and status < 0
                    else f"exit code {status}"
                )
                yield Outcome(job, error=f"its process has ended ({cause})")
            else:
                self._idle.append(connection)
                yield Outcome(job, result, error)

    def end(self) -> Iterator[Outcome]:
        """Ends all workers, and yields how those jobs ended that were done by then; a worker that
        trains saves its state first."""
        yield from self._answers(0.0)
        for connection, worker in self._workers.items():
            if worker.pid is not None and connection in self._jobs:
                with suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGINT)
        deadline = time.monotonic() + END_S
        while self._jobs and (left_s := deadline - time.monotonic()) > 0:
            # What ends without a result now was interrupted.
            yield from (one for one in self._answers(left_s) if not one.error)
        for connection in self._idle:
            # A worker without a job reads the end of the connection.
            connection.close()
        for worker in self._workers.values():
            worker.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Ends all workers that are left, at once."""
        for worker in self._workers.values():
            worker.kill()
            worker.join()
        self._workers.clear()
        self._jobs.clear()
        self._idle.clear()


def _work(connection: Connection, function: Callable[..., Any]) -> None:
    # Signals of the terminal go to its whole group of processes.
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(KeyboardInterrupt):
        # Ignored where a script has started the study with `&`; held back by `_hire`.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        while _answer(connection, function):
            # What is left are modules, which the collector need not look at in every further job,
            # and perhaps a model that something still held: it is looked at again after the next.
            gc.unfreeze()
            gc.collect()
            gc.freeze()
            _give_back()


def _give_back() -> None:
    """Hands freed memory back to the system: glibc keeps what a model's run has freed, 3.4 of 4.2
    GB with SmolLM2, and in pieces that the next run cannot fill."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _answer(connection: Connection, function: Callable[..., Any]) -> bool:
    """Does the next job; False where there is none."""
    try:
        job = connection.recv()
    except (EOFError, OSError):
        return False
    try:
        answer = (function(job), "")
    except TreegraftError as error:
        answer = (None, plain(str(error)))
    except Exception:  # of a job, which must not end the others
        answer = (None, traceback.format_exc())
    # A result that is there is handed over, whatever comes.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    with suppress(OSError):
        connection.send(answer)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    return True


def _end_with_parent() -> None:
    """Ends this process where the one that started it was killed: another may go on with its
    run."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
