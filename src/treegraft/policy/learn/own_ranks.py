"""Ranks that a training starts itself, all on this machine. They meet at a file in a folder that
nobody else may enter, so that nothing listens for it on any network."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from treegraft.policy.learn.ranks import Ranks
from treegraft.settings.config import Config
from treegraft.settings.load import config_json

GRACE_S = 30.0
"""Longest wait for a rank to end after the last order."""
FAILED_S = 3.0
"""The same where the run has failed: the other ranks hold nothing."""


@contextmanager
def started(config: Config, size: int) -> Iterator[Ranks]:
    """Holds the connection to the other ranks of a training, whose rank 0 is this process; they
    have ended at the end of the block. Raises as `Ranks` does."""
    grace_s, processes = FAILED_S, list[subprocess.Popen[bytes]]()
    with tempfile.TemporaryDirectory(prefix="treegraft-ranks-") as folder:
        meeting = f"file://{folder}/store?world_size={size}&rank="
        try:
            for rank in range(1, size):
                processes.append(_rank(config, f"{meeting}{rank}", rank))
            ranks = Ranks(config, f"{meeting}0", processes)
            try:
                yield ranks
            finally:
                ranks.leave()
            grace_s = GRACE_S
        finally:
            for process in processes:
                try:
                    process.wait(grace_s)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _rank(config: Config, meeting: str, rank: int) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    # With the first two it ends with this process, see `ranks`.
    own = {"TORCHELASTIC_RUN_ID": "treegraft", "RANK": str(rank), "PYTHONPATH": path}
    process = subprocess.Popen(
        [sys.executable, "-m", "treegraft.launch.rank", meeting],
        stdin=subprocess.PIPE,
        env={**os.environ, **own, "LOCAL_RANK": str(rank)},
        # Ctrl-C is for rank 0, which saves with the others' help.
        start_new_session=True,
    )
    assert process.stdin is not None
    # One that has ended already is named by `Ranks`.
    with suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(config_json(config).encode())
    return process
