"""Processes that begin with everything loaded: torch, transformers and Treegraft are imported by
one process, which forks for each command. It takes what `subprocess.Popen` would take, for tests
whose subject is what a process does and not how it is loaded."""

from __future__ import annotations

import atexit
import contextlib
import io
import multiprocessing
import multiprocessing.forkserver as forkserver
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import reduction
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

LOADED = (
    "torch",
    "torch._dynamo",
    "transformers",
    "transformers.modeling_utils",
    "transformers.models.llama.modeling_llama",
    "treegraft.train",
    "treegraft.cli.main",
    "treegraft.policy.engine.native",
    "treegraft.algo.objectives",
    "treegraft.runs.recorder",
    "tests.support.forked",
    "tests.support.loaded",
)
"""What commands import most of their time for."""


def not_waited_for(_: int) -> None:
    """Takes the place of `os.fsync` in tests."""


class _Handle:
    """The number of an open file here, that of its copy in the other process."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _copied, (reduction.DupFd(self.number),)


def _copied(other: Any) -> _Handle:
    return _Handle(other.detach())


def context() -> ForkServerContext:
    """Returns the context whose processes begin with everything loaded."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(list(LOADED))
    # Now, so that it does not begin with the masks and folders of a test.
    forkserver.ensure_running()
    return found


def _work(
    words: Sequence[str],
    folder: str,
    environment: Mapping[str, str],
    out: _Handle,
    err: _Handle,
    is_fresh: bool,
) -> None:
    """Does in a process of its own what `python -m MODULE ARGUMENTS` does, or `python -c CODE`."""
    for handle, stream in ((out, 1), (err, 2)):
        os.dup2(handle.number, stream)
    for number in {out.number, err.number} - {1, 2}:
        os.close(number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    if "PYTEST_CURRENT_TEST" in environment:
        os.fsync = not_waited_for
    os.chdir(folder)
    sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False), encoding="utf-8")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*filter(None, paths), *(one for one in sys.path if one)]
    for name in list(sys.modules) if is_fresh else ():
        if name.partition(".")[0] == "treegraft":
            del sys.modules[name]
    sys.argv = ["-c", *words[2:]] if words[0] == "-c" else list(words)
    try:
        if words[0] == "-c":
            exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    finally:
        # A process of multiprocessing leaves them out.
        atexit._run_exitfuncs()
        sys.stdout.flush()


class Forked:
    """A running `python -m MODULE ARGUMENTS`, with the face of `subprocess.Popen` as far as tests
    need it."""

    def __init__(
        self,
        words: Sequence[str | Path],
        *,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        stderr: int | None = None,
        is_fresh: bool = False,
    ) -> None:
        """Starts it; standard output is a pipe, and so is standard error.

        Args:
            stderr: `subprocess.STDOUT` for one pipe of both.
            is_fresh: nothing of Treegraft's is loaded; it comes from where PYTHONPATH leads.
        """
        self.args = [str(word) for word in words]
        ours, out = os.pipe()
        theirs, err = (None, out) if stderr == subprocess.STDOUT else os.pipe()
        arguments = (self.args, str(cwd), dict(os.environ if env is None else env))
        self._process: BaseProcess = context().Process(
            target=_work, args=(*arguments, _Handle(out), _Handle(err), is_fresh)
        )
        self._process.start()
        for number in {out, err}:
            os.close(number)
        self.stdout = open(ours, encoding="utf-8", errors="replace")  # noqa: SIM115
        self.stderr = None if theirs is None else open(theirs, encoding="utf-8")  # noqa: SIM115
        self.pid = self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        """Its exit code, negative that of the signal which ended it; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Returns `returncode`."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code once it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not.
        """
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal, to nobody where it has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Returns what it prints until its end, and what goes to standard error."""
        said = [one and one.read() for one in (self.stdout, self.stderr)]
        self.wait(timeout)
        self.close()
        return said[0] or "", said[1] or ""

    def close(self) -> None:
        """Ends it, and closes what it printed to."""
        self.kill()
        self._process.join()
        for one in (self.stdout, self.stderr):
            if one is not None:
                one.close()

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.send_signal(signal.SIGTERM)
