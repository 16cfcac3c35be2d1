"""The learner of several ranks on one card: FSDP2 at world size 1."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

from treegraft.settings.policy import LearnSettings

if TYPE_CHECKING:
    from treegraft.policy.learn.sharded import ShardedLearner


@contextmanager
def one_rank(
    learn: LearnSettings, *, dtype: str = "float32"
) -> Iterator[Callable[[Any], ShardedLearner]]:
    """Holds the connection of a job of one rank, as torchrun would start it, and gives the maker of
    its learner from a whole model."""
    from treegraft.policy.learn.ranks import Ranks
    from treegraft.policy.learn.sharded import ShardedLearner, model_shape
    from treegraft.settings.load import load_config

    given = {name: getattr(learn, name) for name in ("lr", "max_pack_tokens")}
    config = load_config(
        {
            # Its weights are given to the learner; here the path only says that it is not "tiny".
            "model": {
                "path": "shape:qwen2.5-7b",
                "dtype": dtype,
                "gradient_checkpointing": dtype == "bfloat16",
            },
            "learn": given,
        }
    )
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    started = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    started |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with mock.patch.dict(os.environ, started):
        ranks = Ranks(config)
        try:
            yield lambda model: ShardedLearner(ranks, model_shape(model), config, source=model)
        finally:
            ranks.close()
