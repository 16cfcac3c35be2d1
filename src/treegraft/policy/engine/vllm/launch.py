"""Starts a server and ends it with all its processes when the run that wanted it has ended.

A script of its own, free of other packages. The run holds the other end of standard input: however
it ends, also by SIGKILL, the pipe is closed then.

    python launch.py '["FOLDER", ...]' COMMAND ...

The folders are removed if the run has died, and so cannot remove them itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time

POLL_S = 0.2
GRACE_S = 8.0
"""Time that the server gets to end, and then its processes, in seconds."""


def main(folders: list[str], command: list[str]) -> int:
    """Returns the server's exit status."""
    parent = os.getppid()
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda got, _: asked.append(got))
    # A group of its own, by which the processes that a dead server leaves are found.
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
    # A fork of the run may leave the pipe open, so the parent's id is compared too.
    while server.poll() is None and not asked and os.getppid() == parent:
        is_closed, _, _ = select.select([0], [], [], POLL_S)
        if is_closed:
            break
    end_all(server)
    if os.getppid() != parent:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    return server.returncode


def end_all(server: subprocess.Popen[bytes]) -> None:
    """Ends the server and every process of its group, first by SIGTERM."""
    # The server first, which ends its own processes in order; what it leaves comes after it.
    server.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):  # nobody is left
        os.killpg(server.pid, signal.SIGTERM)
        end = time.monotonic() + GRACE_S
        while time.monotonic() < end:
            # Python's processes remove their shared memory and semaphores meanwhile.
            time.sleep(POLL_S)
            os.killpg(server.pid, 0)
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), sys.argv[2:]))
