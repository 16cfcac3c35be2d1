"""Worker processes of a study: one for each job, ended together with the process that started
them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import Any

from treegraft import TreegraftError
from treegraft.parts import interrupt, plain

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
LOADED = ("torch", "transformers.models.llama.modeling_llama", "treegraft.extras.lab.study.work")
"""Modules that a job would import most of its time."""
END_S = 120.0
"""How long a worker may take to save and end."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended: Outcome(job, {"curve": [...]})"""

    job: Any
    result: Any = None
    error: str = ""
    """What it failed with; "" if it did not."""


class Pool:
    """Up to `num` processes at a time that call one function with one job each.

    They run at one thread. A job's memory goes back to the system with its process. A terminal's
    Ctrl-C does not reach them: the process that started them decides, see `end`.
    """

    def __init__(self, function: Callable[..., Any], num: int) -> None:
        self.num = num
        self._function = function
        self._context = _loaded()
        self._workers: dict[Connection, tuple[Any, Any]] = {}
        """Jobs and their processes."""

    @property
    def num_running(self) -> int:
        """Jobs under way."""
        return len(self._workers)

    @property
    def has_room(self) -> bool:
        """Whether another job could begin at once."""
        return self.num_running < self.num

    def start(self, job: Any) -> None:
        """Begins a job."""
        # One pipe a process: a worker that is killed while it writes would break a shared one.
        ours, theirs = self._context.Pipe()
        arguments = (theirs, self._function, job)
        process = self._context.Process(target=_work, args=arguments, daemon=True)
        process.start()
        # Our copy of it: else the pipe would stay open when the worker has ended.
        theirs.close()
        self._workers[ours] = (job, process)

    def outcomes(self, timeout_s: float | None = None) -> Iterator[Outcome]:
        """Waits for the end of a job or more, and yields how each ended."""
        for connection in wait(list(self._workers), timeout_s):
            assert isinstance(connection, Connection)
            job, process = self._workers.pop(connection)
            try:
                answer = connection.recv()
            except (EOFError, ConnectionResetError):
                answer = None
            process.join()
            connection.close()
            yield Outcome(job, *(answer or (None, _cause(process.exitcode))))

    def end(self) -> Iterator[Outcome]:
        """Ends all workers, and yields how those jobs ended that were done by then; a worker that
        trains saves its state first."""
        yield from self.outcomes(0.0)
        for _, process in self._workers.values():
            # A worker that trains saves on SIGTERM, as on Ctrl-C.
            process.terminate()
        deadline = time.monotonic() + END_S
        while self._workers and (left_s := deadline - time.monotonic()) > 0:
            # What ends without a result now was interrupted.
            yield from (one for one in self.outcomes(left_s) if not one.error)
        self.kill()

    def kill(self) -> None:
        """Ends all workers that are left, at once."""
        for connection, (_, process) in self._workers.items():
            process.kill()
            process.join()
            connection.close()
        self._workers.clear()


def _cause(status: int | None) -> str:
    """Why a process has ended without an answer."""
    if status is not None and status < 0:
        return f"its process has ended (signal {-status}, of the system if memory ran out)"
    return f"its process has ended (exit code {status})"


def _loaded() -> ForkServerContext:
    """A context whose processes are forks of one that has loaded everything, at one thread."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(LOADED))
    before = {name: os.environ.get(name) for name in THREADS}
    # Read once, when the libraries are loaded.
    os.environ |= dict.fromkeys(THREADS, "1")
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
    return context


def _work(connection: Connection, function: Callable[..., Any], job: Any) -> None:
    # Signals of the terminal go to its whole group of processes.
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # A study that `nohup` or a script's `&` has started still ends its workers by SIGTERM.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with suppress(KeyboardInterrupt), interrupt.others_as_ctrl_c():
        try:
            answer = (function(job), "")
        except TreegraftError as error:
            answer = (None, plain(str(error)))
        except Exception:  # of a job, which must not end the others
            answer = (None, traceback.format_exc())
        # A result that is there is handed over, whatever comes.
        signal.pthread_sigmask(signal.SIG_BLOCK, interrupt.OTHERS)
        with suppress(OSError):
            connection.send(answer)


def _end_with_parent() -> None:
    """Ends this process if the one that started it was killed: another may go on with its run."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
