"""Starts a server and ends it, with all its processes, when the run that wanted it has ended.

A script of its own, free of other packages. The run holds the other end of standard input: however
it ends, also by SIGKILL, the pipe is closed then.

    python launch.py '["FOLDER", ...]' COMMAND ...

The folders are removed where the run has ended without saying so.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

POLL_S = 0.5
GRACE_S = 8.0
"""From SIGTERM to SIGKILL, in seconds."""
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
SHARED_MEMORY = Path("/dev/shm")


def main(folders: list[str], command: list[str]) -> int:
    """Returns the server's exit status."""
    prctl = ctypes.CDLL(None).prctl
    # The server's own children become this process's when it dies, and so can be found and ended.
    prctl(_SUBREAPER, 1, 0, 0, 0)
    before = shared_memory().keys()
    parent, me = os.getppid(), os.getpid()

    def die_with_me() -> None:
        prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != me:
            os._exit(1)

    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda got, _: asked.append(got))
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_me)
    seen: set[int] = set()
    is_orphan = False
    while server.poll() is None and not asked:
        readable, _, _ = select.select([0], [], [], POLL_S)
        said = os.read(0, 1) if readable else None
        # A fork of the run's may hold the pipe open.
        is_orphan = said == b"" or os.getppid() != parent
        if said is not None or is_orphan:
            break
        seen |= mapped_shared_memory()
    end_all(server)
    for folder in folders if is_orphan else ():
        shutil.rmtree(folder, ignore_errors=True)
    # Only what processes of this server had open, so other programs' files stay.
    for inode, file in shared_memory().items():
        if inode in seen - before:
            file.unlink(missing_ok=True)
    return server.returncode or 0


def end_all(server: subprocess.Popen[bytes]) -> None:
    """Ends the server and every process below this one, first by SIGTERM."""
    # A server that lives ends its own processes, in order; what a dead one has left cannot.
    send(signal.SIGTERM, [server.pid] if server.poll() is None else descendants())
    end = time.monotonic() + GRACE_S
    while descendants() and time.monotonic() < end:
        server.poll()
        time.sleep(0.1)
    # Twice, for what was begun meanwhile.
    for _ in range(2):
        send(signal.SIGKILL, descendants())
        time.sleep(0.1)
    server.wait()
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def send(number: int, pids: list[int]) -> None:
    """Sends a signal to processes, some of which may have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def descendants() -> list[int]:
    """Returns every process below this one, those that have ended but are not collected left
    out."""
    children: dict[int, list[int]] = {}
    ended: set[int] = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                # The name, in brackets, may hold anything.
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                children.setdefault(int(parent), []).append(int(entry.name))
                if state == "Z":
                    ended.add(int(entry.name))
    found, front = [], [os.getpid()]
    while front:
        below = children.get(front.pop(), [])
        found += below
        front += below
    return [pid for pid in found if pid not in ended]


def shared_memory() -> dict[int, Path]:
    """Returns the files by which Python's processes share memory and semaphores, by inode."""
    found = {}
    for pattern in ("psm_*", "sem.mp-*"):
        for file in SHARED_MEMORY.glob(pattern):
            with contextlib.suppress(OSError):
                found[file.stat().st_ino] = file
    return found


def mapped_shared_memory() -> set[int]:
    """Returns the inodes of the shared memory that processes below this one have mapped.

    Not the names: a semaphore is mapped under another one than it is left with.
    """
    found = set()
    for pid in descendants():
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                if f" {SHARED_MEMORY}/" in line:
                    found.add(int(line.split()[4]))
    return found


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), sys.argv[2:]))
