"""Whether several ranks learn, started by torchrun or by this training, and the connection between
them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from typing import TYPE_CHECKING

from treegraft.core.errors import SettingError
from treegraft.core.team import Alone, Team
from treegraft.settings.config import Config
from treegraft.settings.load import config_json

if TYPE_CHECKING:
    from treegraft.policy.learn.ranks import Ranks

MEETING = "TREEGRAFT_MEETING"
"""The environment variable of a rank that a training has started itself: where the ranks meet."""
GRACE_S = 30.0
"""Longest wait for a rank to end after the last value."""
FAILED_S = 3.0
"""The same where the run has failed: the other ranks hold nothing."""


def is_started() -> bool:
    """Returns whether this process is a rank already."""
    by_torchrun = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    return by_torchrun or MEETING in os.environ


def num_ranks(config: Config) -> int:
    """Returns how many ranks learn: those that there are, else those of the settings.

    Raises:
        SettingError: there are others than learn.ranks.
    """
    wanted = config.learn.ranks
    if not is_started():
        return 1 if wanted == "auto" else wanted
    if MEETING in os.environ:
        assert wanted != "auto", "a training that starts ranks itself has their number"
        return wanted
    started = int(os.environ["WORLD_SIZE"])
    if wanted not in ("auto", started):
        raise SettingError(
            f"learn.ranks: got {wanted}, but the number of processes is {started}; expected both to"
            f" be equal. Start with torchrun --nproc-per-node {wanted} -m treegraft train RECIPE,"
            " or without torchrun: treegraft train RECIPE starts them itself.",
            code="ranks-unequal",
        )
    return started


@contextmanager
def joined(config: Config, command: str = "train") -> Iterator[Team]:
    """Holds the connection to the other ranks for the time of the block, at whose end rank 0 ends
    them. Without torchrun it starts those of learn.ranks.

    Raises:
        RankError: a rank has not come, or the run was interrupted since one has ended.
        SettingError: ranks are not alike, or their number is not that of the settings.
    """
    size = num_ranks(config)
    if size == 1:
        yield Alone()
        return
    # torch.distributed is for several processes alone.
    from treegraft.policy.learn.ranks import Ranks

    if is_started():
        held: AbstractContextManager[Ranks] = closing(
            Ranks(config, os.environ.get(MEETING, "env://"))
        )
    else:
        held = _started(config, size, command)
    with held as ranks:
        try:
            yield ranks
        except KeyboardInterrupt:
            # torchrun ends all ranks once one of them has died, which may be the cause.
            if not ranks.is_done:
                ranks.check()
            raise
        except Exception as error:
            ranks.last_words(error)
            raise


@contextmanager
def _started(config: Config, size: int, command: str) -> Iterator[Ranks]:
    """Holds the connection to the other ranks of a training, all on this machine, whose rank 0 is
    this process; they have ended at the end of the block. Raises as `Ranks` does.

    They meet at a file in a folder that nobody else may enter, so that nothing listens for it on
    any network.
    """
    from treegraft.policy.learn.ranks import Ranks

    grace_s = FAILED_S
    processes = list[subprocess.Popen[bytes]]()
    with tempfile.TemporaryDirectory(prefix="treegraft-ranks-") as folder:
        meeting = f"file://{folder}/store?world_size={size}&rank="
        try:
            for rank in range(1, size):
                processes.append(_rank(config, f"{meeting}{rank}", rank, command))
            ranks = Ranks(config, f"{meeting}0", processes)
            try:
                yield ranks
            finally:
                ranks.close()
            grace_s = GRACE_S
        finally:
            for process in processes:
                try:
                    process.wait(grace_s)
                except subprocess.TimeoutExpired:
                    # It waits in a collective that nobody will join any more.
                    process.kill()
                    process.wait()


def _rank(config: Config, meeting: str, rank: int, command: str) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    # With the first two it ends with this process, see `ranks`.
    own = {"TORCHELASTIC_RUN_ID": "treegraft", "RANK": str(rank), "PYTHONPATH": path}
    process = subprocess.Popen(
        [sys.executable, "-m", "treegraft.rank", meeting, command],
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
