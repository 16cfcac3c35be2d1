"""An actor that holds one rank of the learner: a process of its own, started as torchrun would
start it, which ends with the actor."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from typing import Any

from treegraft.extras.ray.actors import Actor

LOOK_S = 0.2
"""Time between two looks at a rank's output and at whether it has ended."""
_OF_RAY = ("RAY_AUTH_", "RAY_USAGE_", "RAY_ENABLE_", "RAY_DEDUP_", "RAY_DISABLE_", "RAY_ACCEL_")
"""Ray's variables that a rank takes over; the others are those of this actor alone."""
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


class RankActor(Actor):
    """One rank of the learner."""

    _process: subprocess.Popen[bytes] | None = None
    _store: Any = None

    async def begin(self) -> dict[str, Any]:
        """Returns the address of its machine, and the GPUs that it was given there."""
        import ray

        gpus = [str(one) for one in ray.get_gpu_ids()]
        return {"address": ray.util.get_node_ip_address(), "gpus": gpus}

    async def open_store(self) -> int:
        """Returns the port at which the ranks find each other; it outlives each of them."""
        import ray

        self._store, port = _store_at(ray.util.get_node_ip_address())
        return port

    async def run(self, arguments: list[str], variables: dict[str, str]) -> AsyncIterator[str]:
        """Yields the lines that the rank writes, as they come, and at its end its exit code,
        negative for a signal: JSON of a text or of a number.

        Args:
            arguments: what follows `python`.
            variables: environment variables beside this actor's own.
        """
        # Not a pipe, whose end does not come while another process that the rank has started
        # holds it.
        with tempfile.TemporaryFile() as output:
            process = self._process = subprocess.Popen(
                [sys.executable, *arguments],
                env=_environment(variables),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=_dies_with(os.getpid()),
            )
            code, place = None, 0
            while code is None:
                await asyncio.sleep(LOOK_S)
                code = process.poll()
                new = os.pread(output.fileno(), os.fstat(output.fileno()).st_size - place, place)
                if code is None:
                    new = new[: new.rfind(b"\n") + 1]
                place += len(new)
                if new:
                    yield json.dumps(new.decode(errors="replace"))
            yield json.dumps(code)

    async def send(self, number: int) -> None:
        """Sends the process a signal, as soon as there is one."""
        while self._process is None:
            await asyncio.sleep(LOOK_S)
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
        # At once: one that saved first would hold the run folder against the ranks that follow it.
        prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
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
