"""Whether torchrun has started several processes, and the connection between them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from treegraft.core.errors import SettingError
from treegraft.settings.config import Config

if TYPE_CHECKING:
    from treegraft.policy.learn.ranks import Ranks


def num_started(config: Config) -> int:
    """Returns how many ranks torchrun has started, 1 without it.

    Raises:
        SettingError: learn.ranks is another number.
    """
    started = 1
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        started = int(os.environ["WORLD_SIZE"])
    wanted = config.learn.ranks
    if wanted not in ("auto", started):
        raise SettingError(
            f"learn.ranks: got {wanted}, but the number of processes is {started}; expected both to"
            f" be equal. Start with torchrun --nproc-per-node {wanted} -m treegraft train RECIPE,"
            ' or leave it at "auto".',
            code="ranks-unequal",
        )
    return started


@contextmanager
def joined(config: Config) -> Iterator[Ranks | None]:
    """Holds the connection to the other ranks for the time of the block, at whose end rank 0 ends
    them; None for one process.

    Raises:
        RankError: a rank has not come, or an end was asked for because one has ended.
        SettingError: ranks are not alike, or their number is not that of the settings.
    """
    if num_started(config) == 1:
        yield None
        return
    # torch.distributed is for several processes alone.
    from treegraft.policy.learn.ranks import Ranks

    ranks = Ranks(config)
    try:
        yield ranks
    except KeyboardInterrupt:
        # torchrun ends all ranks once one of them has died, which may be the cause.
        ranks.check()
        raise
    finally:
        ranks.leave()
