"""An actor that holds one rank of the learner: a process of its own, started as torchrun would
start it, whose end it reports and which ends with it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any

from treegraft.extras.ray.actors import Actor, replying

LOOK_S = 1.0
"""Longest time after which `look` returns."""
LAST_S = 2.0
"""Longest wait for the last lines of a process that has ended."""
MAX_LINE = 1 << 20
"""Longest line of output, in bytes."""
_OF_RAY = ("RAY_AUTH_", "RAY_USAGE_", "RAY_ENABLE_", "RAY_DEDUP_", "RAY_DISABLE_", "RAY_ACCEL_")
"""Ray's variables that a rank takes over; the others are those of this actor alone."""
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


class RankActor(Actor):
    """One rank of the learner."""

    def __init__(self, role: str, number: int, place: str) -> None:
        """Starts nothing yet."""
        super().__init__(role, number, place)
        self._lines: list[str] = []
        self._code: int | None = None
        self._news = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._store: Any = None

    @replying
    async def meet(self) -> dict[str, Any]:
        """Returns the address of its machine, and the GPUs that it was given there."""
        import ray

        gpus = [str(one) for one in ray.get_gpu_ids()]
        return {"address": ray.util.get_node_ip_address(), "gpus": gpus}

    @replying
    async def open_store(self) -> int:
        """Returns the port at which the ranks find each other; it outlives each of them."""
        import ray

        self._store, port = _store_at(ray.util.get_node_ip_address())
        return port

    @replying
    async def begin(self, request: str) -> int:
        """Returns the number of the rank's process.

        Args:
            request: JSON of [what follows `python`, environment variables].
        """
        arguments, variables = json.loads(request)
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, *arguments),
            cwd=self.place.cwd,
            env=_environment(variables),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=MAX_LINE,
            preexec_fn=_dies_with(os.getpid()),
        )
        self._reading = asyncio.create_task(self._read(self._process))
        return self._process.pid

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Keeps the output of a process up to its end, and its exit code."""
        assert process.stdout is not None
        reading = asyncio.create_task(self._read_lines(process.stdout))
        # Not `wait` or the output's end: processes that it has started may hold the pipe open.
        while process.returncode is None:
            await asyncio.wait({reading}, timeout=LOOK_S)
            if reading.done():
                await process.wait()
        await asyncio.wait({reading}, timeout=LAST_S)
        reading.cancel()
        self._code = process.returncode
        self._news.set()

    async def _read_lines(self, output: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await output.readline()
            except ValueError:
                line = b"[a line that was too long is left out]\n"
            if not line:
                break
            self._lines.append(line.decode(errors="replace").rstrip("\n"))
            self._news.set()

    @replying
    async def look(self) -> dict[str, Any]:
        """Returns lines of output since the last call, and once there are no more the exit code,
        negative for a signal; within LOOK_S."""
        if not self._lines and self._code is None:
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._news.wait()
        lines, self._lines = self._lines, []
        return {"lines": lines, "code": self._code}

    @replying
    async def send(self, number: int) -> None:
        """Sends the process a signal."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("RAY_") or name.startswith(_OF_RAY)
    }
    return {**own, "PYTHONUNBUFFERED": "1", **variables}


def _dies_with(parent: int) -> Any:
    """What a child does before it becomes another program: it ends where its parent does, and hears
    the signals that Ray keeps from its workers."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        prctl(_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def _store_at(address: str) -> tuple[Any, int]:
    """Returns a store at which ranks find each other, as long as it is held, and its port.

    Args:
        address: of this machine; the store listens on that interface alone.
    """
    from torch import distributed

    untyped: Any = distributed
    listening = socket.create_server((address, 0))
    port: int = listening.getsockname()[1]
    store = untyped.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    return store, port
