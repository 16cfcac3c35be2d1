"""Starts a server and ends it with all that it has started, also what has left its session, when
the server ends or the process that wanted it does, however that ends. On Linux.

A script of its own, free of other packages:

    python -I keeper.py PARENT COMMAND ...

The server has this process's standard input, output and error. SIGTERM to both requests the end.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

GRACE_S = 2.0
"""Wait for a server to end by itself, and again after SIGTERM, in seconds."""
_POLL_S = 0.5
_MOST_ROUNDS = 100
"""Each kills what the last one has left: a process may refuse to end for a while."""
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


def main(parent: int, command: list[str]) -> int:
    """Returns the server's exit status."""
    # Whose parent ends becomes this process's child, and so can be found.
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    asked: list[int] = []
    woken, waking = os.pipe()
    os.set_blocking(waking, False)
    signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    try:
        server = subprocess.Popen(command)
    except FileNotFoundError:
        sys.exit(f"there is no command '{command[0]}'")
    except OSError as error:
        sys.exit(f"it could not be started: {error}")
    while server.poll() is None and not asked and os.getppid() == parent:
        if select.select([woken], [], [], _POLL_S)[0]:
            os.read(woken, 1000)
            # Else those that end would stay as zombies until this process ends.
            for pid in _children():
                if pid != server.pid:
                    with suppress(ChildProcessError):
                        os.waitpid(pid, os.WNOHANG)
    # Its parent was killed: nobody else would end the server.
    if os.getppid() != parent:
        os.killpg(0, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        server.wait(GRACE_S)
    _end_children()
    return server.returncode or 0


def _end_children() -> None:
    with suppress(ChildProcessError):
        for _ in range(_MOST_ROUNDS):
            for pid in _children():
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            # An error once there is none left.
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.01)


def _children() -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError, ValueError):
            # The name, in brackets, may hold anything.
            parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
            if int(parent) == os.getpid():
                found.append(int(entry.name))
    return found


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
