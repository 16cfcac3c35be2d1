"""Ranks that a training starts itself, all on this machine. They meet at a file in a folder that
nobody else may enter, so that nothing listens for it on any network."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from treegraft.settings.config import Config
from treegraft.settings.load import config_json

STORE = "TREEGRAFT_RANK_STORE"
"""Environment variable: the file at which the ranks meet."""
GRACE_S = 30.0
"""Longest wait for a rank to end after the last order."""
FAILED_S = 3.0
"""The same where the run has failed: the other ranks hold nothing."""


@contextmanager
def started(config: Config, size: int) -> Iterator[Sequence[subprocess.Popen[bytes]]]:
    """Holds the other ranks of a training, whose rank 0 is this process; they have ended at the
    end of the block."""
    grace_s, processes = FAILED_S, list[subprocess.Popen[bytes]]()
    with tempfile.TemporaryDirectory(prefix="treegraft-ranks-") as folder:
        of_all = {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
            STORE: f"{folder}/store",
        }
        own = of_all | {"RANK": "0", "LOCAL_RANK": "0"}
        before = {name: os.environ.get(name) for name in own}
        try:
            for rank in range(1, size):
                processes.append(_rank(config, of_all, rank))
            os.environ.update(own)
            yield processes
            grace_s = GRACE_S
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
            for process in processes:
                try:
                    process.wait(grace_s)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _rank(config: Config, of_all: dict[str, str], rank: int) -> subprocess.Popen[bytes]:
    own = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        # It ends with this process, see `ranks`.
        "TORCHELASTIC_RUN_ID": "treegraft",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "treegraft.launch.rank"],
        stdin=subprocess.PIPE,
        env={**os.environ, **of_all, **own},
        # Ctrl-C is for rank 0, which saves with the others' help.
        start_new_session=True,
    )
    assert process.stdin is not None
    with process.stdin as pipe:
        pipe.write(config_json(config).encode())
    return process
