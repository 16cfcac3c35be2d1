"""The Java process in which worlds of ScienceWorld live: one for each process of ours, started at
need, ended with it."""

from __future__ import annotations

import atexit
import os
import select
import shutil
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final

from treegraft import ToolUnavailable

START_DEADLINE_S: Final = 120.0
"""Longest wait for the Java process to start, in seconds."""
ANSWER_DEADLINE_S: Final = 300.0
"""Longest wait for one answer, in seconds; a process that misses it is ended, with its worlds. A
gold path may take 5 s of a core, and cores may be busy."""
END_DEADLINE_S: Final = 5.0
_OPTIONS: Final = (
    # Other collectors and the second compiler would take the cores that the learner computes on.
    *("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
    # Worlds list objects of equal names in the order of their identity hashes, which are drawn from
    # a generator of Java's own. With one hash for all it is the order in which they were made.
    *("-XX:+UnlockExperimentalVMOptions", "-XX:hashCode=2", "-XX:+IgnoreUnrecognizedVMOptions"),
)


class JavaFault(ToolUnavailable):
    """An exception inside a world."""


def java_path() -> str | None:
    """Returns the program `java` of $JAVA_HOME or the search path; None where there is none."""
    home = os.environ.get("JAVA_HOME")
    return (home and shutil.which("java", path=str(Path(home) / "bin"))) or shutil.which("java")


def why_missing() -> str:
    """Returns what is not installed, in words; empty where all is there."""
    packages = [name for name in ("scienceworld", "py4j") if find_spec(name) is None]
    missing = [f"the package '{name}'" for name in packages]
    return " and ".join(missing + ([] if java_path() else ["Java"]))


class Simulator:
    """One Java process and its worlds. Safe for many threads: it does one thing at a time."""

    def __init__(self) -> None:
        """Starts the process. Raises `ToolUnavailable` where that fails or takes too long."""
        from py4j.java_gateway import GatewayParameters, JavaGateway, find_jar_path
        from scienceworld.constants import JAR_PATH

        jars = os.pathsep.join((find_jar_path(), str(JAR_PATH)))
        self._lock = threading.RLock()
        self._free: list[Any] = []
        self.is_closed = False
        # It writes a list of its objects where it stands.
        self._folder = mkdtemp(prefix="treegraft-scienceworld-")
        self.process = subprocess.Popen(
            # It ends itself when its standard input does: with us, however we end.
            [
                *(java_path() or "java", *_OPTIONS, "-classpath", jars),
                *("py4j.GatewayServer", "--die-on-broken-pipe", "--enable-auth", "0"),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=self._folder,
            start_new_session=True,  # Ctrl-C is ours to handle
        )
        try:
            port, token = self._first_lines()
            parameters = GatewayParameters(
                port=port, auth_token=token, auto_field=True, read_timeout=ANSWER_DEADLINE_S
            )
            self._gateway = JavaGateway(gateway_parameters=parameters)
            self._random = getattr(getattr(self._gateway.jvm.scala.util, "Random$"), "MODULE$")
        except BaseException as error:
            self.is_closed = True
            self._kill()
            self._drain()
            if not isinstance(error, Exception):
                raise
            raise ToolUnavailable(
                f"the Java process of ScienceWorld did not start: {error}. Does"
                f" `{java_path() or 'java'} -version` work? It needs version 8 or newer.",
                code="java-not-started",
            ) from error
        # Else it blocks once the pipe is full.
        self._drainer = threading.Thread(target=self._drain, daemon=True)
        self._drainer.start()

    def _first_lines(self) -> tuple[int, str]:
        """The port and the token that it prints first."""
        assert self.process.stdout is not None
        descriptor, told = self.process.stdout.fileno(), b""
        end = time.monotonic() + START_DEADLINE_S
        while told.count(b"\n") < 2:
            left = max(0.0, end - time.monotonic())
            if not select.select([descriptor], [], [], left)[0]:
                raise ToolUnavailable(f"no answer within {START_DEADLINE_S:g} s", code="java-late")
            data = os.read(descriptor, 4096)
            if not data:
                raise ToolUnavailable(
                    f"it ended with status {self.process.wait()}", code="java-ended"
                )
            told += data
        port, token = told.decode().split("\n")[:2]
        return int(port), token.strip()

    @property
    def is_alive(self) -> bool:
        """Whether worlds can be had."""
        return not self.is_closed and self.process.poll() is None

    @contextmanager
    def drawing(self, seed: int) -> Iterator[None]:
        """Holds the process for the time of the block, with its random numbers begun at `seed`.

        Raises:
            JavaFault: an exception of Java.
            ToolUnavailable: the process has ended, or does not answer and is ended.
        """
        from py4j.protocol import Py4JError, Py4JJavaError

        with self._lock:
            if not self.is_alive:
                raise ToolUnavailable(
                    "the Java process of ScienceWorld has ended", code="java-ended"
                )
            try:
                self._random.setSeed(seed >> 1)  # Java's numbers have a sign
                yield
            except Py4JJavaError as error:
                raise JavaFault(str(error.java_exception), code="java-fault") from error
            except (Py4JError, OSError) as error:
                self.close()
                raise ToolUnavailable(
                    f"the Java process of ScienceWorld does not answer: {error}", code="java-silent"
                ) from error

    def take(self) -> Any:
        """Returns a world for one game, not begun. Raises as `drawing`."""
        with self.drawing(0):
            if self._free:
                return self._free.pop()
            return self._gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface()

    def give_back(self, world: Any) -> None:
        """Lets a later game have a world."""
        with self._lock:
            self._free.append(world)

    def close(self) -> None:
        """Ends the process and waits for its end; the worlds are lost."""
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
            with suppress(Exception):
                self._gateway.close()
            # Objects that Python collects later would otherwise ask the ended process.
            self._gateway._gateway_client.is_connected = False
            self._kill()
            self._drainer.join(END_DEADLINE_S)

    def leave(self) -> None:
        """Closes the pipe without ending the process: for a forked child, whose parent owns it."""
        self.is_closed = True
        with suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()

    def _drain(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            deque(stream, 0)

    def _kill(self) -> None:
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


_simulator: Simulator | None = None
_starting = threading.Lock()


def running() -> Simulator:
    """Returns this process's simulator, started where there is none. Raises `ToolUnavailable` where
    it does not start."""
    global _simulator
    with _starting:
        if _simulator is None or not _simulator.is_alive:
            if _simulator is not None:
                _simulator.close()
            _simulator = Simulator()
        return _simulator


@atexit.register
def close() -> None:
    """Ends this process's simulator, where one runs."""
    global _simulator
    with _starting:
        if _simulator is not None:
            _simulator.close()
        _simulator = None


def _after_fork() -> None:
    global _simulator, _starting
    _starting = threading.Lock()
    if _simulator is not None:
        _simulator.leave()
    _simulator = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
