"""Child processes that answer requests within a deadline: some work can hang inside one C call or
take any amount of memory, and only a process can be stopped then.

They read hostile pages, PDF files and LaTeX: they get none of the caller's environment, and where
bubblewrap works no network and no files but Python's own, to be read only.
"""

from __future__ import annotations

import json
import os
import queue
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from treegraft.core.errors import DeadlineExceeded, TreegraftError

START_DEADLINE_S = 120.0
"""Longest wait for a worker to start or to become free, in seconds."""
MAX_ANSWER_BYTES = 50_000_000
"""Longest answer, as JSON."""

_LOOP = Path(__file__).with_name("worker_loop.py")
_KEPT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")
"""Environment variables without which Python may not start, or not alike."""
_TRIED_S = 30.0


def _environment() -> dict[str, str]:
    return {"HOME": "/tmp", **{name: os.environ[name] for name in _KEPT if name in os.environ}}


@cache
def _walls() -> tuple[str, ...]:
    """What stands before a worker's command: bubblewrap with its options; nothing where that does
    not work."""
    if shutil.which("bwrap") is None:
        return ()
    # As the worker will see it: neither its script's folder nor the working directory is in it.
    query = [sys.executable, "-P", "-c", "import json, sys; print(json.dumps(sys.path))"]
    env = _environment()
    said = subprocess.run(query, env=env, capture_output=True, timeout=_TRIED_S, check=True).stdout
    libraries = env.get("LD_LIBRARY_PATH", "").split(":")
    named = [*json.loads(said), sys.prefix, sys.base_prefix, *libraries, "/usr", "/etc/ld.so.cache"]
    # No network, no other processes, nobody's rights.
    parts = ["bwrap", "--unshare-all", "--uid", "65534", "--gid", "65534", "--chdir", "/"]
    parts += ["--proc", "/proc", "--dev", "/dev", "--size", str(64 << 20), "--tmpfs", "/tmp"]
    for path in map(Path, ("/bin", "/lib", "/lib32", "/lib64")):
        if path.is_symlink():
            parts += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            parts += ["--ro-bind", str(path), str(path)]
    # Outer folders first: what is mounted over one would hide what it holds.
    for name in sorted({os.path.abspath(one) for one in named if one} - {"/"}):
        parts += ["--ro-bind-try", name, name]
    with suppress(OSError, subprocess.TimeoutExpired):
        # Tried, not asked for: kernels and containers each forbid it in a way of their own.
        tried = subprocess.run(
            [*parts, sys.executable, "-c", ""], env=env, capture_output=True, timeout=_TRIED_S
        )
        if tried.returncode == 0:
            return tuple(parts)
    return ()


def _command(script: Path) -> list[str]:
    # -P: the folders of the scripts have modules named like packages.
    command = [sys.executable, "-P", str(_LOOP), str(script.resolve())]
    if not (walls := _walls()):
        return command
    shown = [word for path in command[2:] for word in ("--ro-bind", path, path)]
    return [*walls, *shown, *command]


class WorkerPool:
    """Child processes that run one script; each is killed and replaced when it misses a deadline.

    Safe for many threads.
    """

    def __init__(self, script: Path, num_workers: int, *, task: str, package: str) -> None:
        """Starts nothing; processes start when they are needed.

        Args:
            script: a Python file with a function `answer`, from one JSON value to another.
            num_workers: processes at most.
            task: completes "a process that ..." in messages.
            package: the import whose absence is the likely reason when a process does not start.
        """
        self._script = script
        self._task = task
        self._package = package
        self._lock = threading.Lock()
        self._workers: set[Worker] = set()
        # Last in, first out: the processes beyond the need are never started. None stands for one
        # that has not been started.
        self._free: queue.LifoQueue[Worker | None] = queue.LifoQueue()
        for _ in range(num_workers):
            self._free.put(None)

    def start(self) -> None:
        """Starts a process in the background, so that the first request need not wait for it."""
        with suppress(queue.Empty):
            self._free.put(self._free.get_nowait() or self._start())

    def ask(self, request: Any, deadline_s: float, *, cpu_s: float = 0.0) -> Any:
        """Returns a process's answer; None if it did not come in time or the process died.

        Args:
            request: a JSON value.
            deadline_s: longest wait for the answer, in seconds.
            cpu_s: processor seconds after which the process is stopped; 0 for no such limit.

        Raises:
            DeadlineExceeded: no process became free.
            TreegraftError: a process did not start.
        """
        try:
            worker = self._free.get(timeout=START_DEADLINE_S)
        except queue.Empty:
            raise DeadlineExceeded(
                f"no process that {self._task} became free within {START_DEADLINE_S:.0f} s",
                code="worker-late",
            ) from None
        answer = None
        try:
            if worker is not None and worker.process.poll() is not None:
                worker.kill()  # it died meanwhile; its pipes are still open
                worker = None
            worker = worker or self._start()
            if not worker.is_ready():
                raise TreegraftError(
                    f"the process that {self._task} did not start; check its packages with:"
                    f" {sys.executable} -c 'import {self._package}'",
                    code="worker-not-started",
                )
            answer = worker.ask([request, cpu_s, deadline_s + 1.0], deadline_s)
        finally:
            if worker is not None and answer is None:
                with self._lock:
                    self._workers.discard(worker)
                # Not to be used again: its answer may still come, and pass for the next one's.
                worker.kill()
            self._free.put(worker if answer is not None else None)
        return answer

    def close(self) -> None:
        """Ends all processes, those at work included; a later request starts new ones."""
        with self._lock:
            workers = self._workers
            self._workers = set()
        for worker in workers:
            worker.kill()

    def release(self) -> None:
        """Closes the pipes without ending the processes: for a forked child, whose parent owns
        them."""
        for worker in self._workers:
            worker.close_pipes()

    def _start(self) -> Worker:
        worker = Worker(self._script)
        with self._lock:
            self._workers = {one for one in self._workers if one.process.poll() is None} | {worker}
        return worker


class Worker:
    """One child process, for one thread at a time; `kill` may come from another."""

    def __init__(self, script: Path) -> None:
        # Not `multiprocessing`, whose children import the caller's main module or copy its memory.
        # Nor pebble: it unpickles replies, so a worker that hostile input has taken over could run
        # code in this process.
        self.process = subprocess.Popen(
            _command(script),
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )
        self._is_ready = False
        self._closing = threading.Lock()

    def is_ready(self) -> bool:
        """Returns whether the process has started, after waiting for that."""
        self._is_ready = self._is_ready or self._read(START_DEADLINE_S) == "ready"
        return self._is_ready

    def ask(self, request: Any, deadline_s: float) -> Any:
        """Returns the answer; None if it is late, after which the worker is of no use."""
        assert self.process.stdin is not None
        try:
            # A worker reads a whole line before it begins, so writing never waits for its answer.
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except (OSError, ValueError):  # it has ended, or was closed by another thread
            return None
        return self._read(deadline_s)

    def kill(self) -> None:
        """Ends the process and waits for its end."""
        # Two threads may find it late at once.
        with self._closing:
            # With bubblewrap the worker is a child of this process, in its group.
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.close_pipes()

    def close_pipes(self) -> None:
        """Closes this side of the pipes."""
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()

    def _read(self, deadline_s: float) -> Any:
        """Returns one line as JSON; None when the deadline passed or the process ended."""
        end = time.monotonic() + deadline_s
        line = bytearray()
        poll = select.poll()
        assert self.process.stdout is not None
        try:
            descriptor = self.process.stdout.fileno()
            poll.register(descriptor, select.POLLIN)
            while not line.endswith(b"\n"):
                if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
                    return None
                # Not through the buffered stream, which would wait for more without a deadline.
                data = os.read(descriptor, 1 << 16)
                if not data or len(line) > MAX_ANSWER_BYTES:
                    return None
                line += data
        except (OSError, ValueError):  # closed by another thread
            return None
        return json.loads(line)
