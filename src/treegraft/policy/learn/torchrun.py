"""Whether several ranks learn, started by torchrun or by this training, and the connection between
them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from typing import TYPE_CHECKING

from treegraft.core.errors import SettingError
from treegraft.settings.config import Config

if TYPE_CHECKING:
    from treegraft.policy.learn.ranks import Ranks


def is_started() -> bool:
    """Returns whether this process is a rank already."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def num_ranks(config: Config) -> int:
    """Returns how many ranks learn: those that there are, else those of the settings.

    Raises:
        SettingError: there are others than learn.ranks.
    """
    wanted = config.learn.ranks
    if not is_started():
        return 1 if wanted == "auto" else wanted
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
def joined(config: Config) -> Iterator[Ranks | None]:
    """Holds the connection to the other ranks for the time of the block, at whose end rank 0 ends
    them; None for one process. Without torchrun it starts those that learn.ranks asks for.

    Raises:
        RankError: a rank has not come, or an end was asked for because one has ended.
        SettingError: ranks are not alike, or their number is not that of the settings.
    """
    size = num_ranks(config)
    if size == 1:
        yield None
        return
    # torch.distributed is for several processes alone.
    if is_started():
        from treegraft.policy.learn.ranks import Ranks

        held: AbstractContextManager[Ranks] = closing(Ranks(config))
    else:
        from treegraft.policy.learn.own_ranks import started

        held = started(config, size)
    with held as ranks:
        try:
            yield ranks
        except KeyboardInterrupt:
            # torchrun ends all ranks once one of them has died, which may be the cause.
            ranks.check()
            raise
