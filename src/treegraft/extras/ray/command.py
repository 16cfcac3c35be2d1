"""The command `treegraft cluster`: a run whose engines are actors of a Ray cluster."""

from __future__ import annotations

from typing import Any

import treegraft
from treegraft.parts import commands


@commands.run_command
def cluster(config: treegraft.Config, **arguments: Any) -> None:
    """Train an agent with a recipe whose engines run on a Ray cluster, as its table [cluster] says.

    The run folder, and the trees in it, are those of `treegraft train`.
    """
    treegraft.train(config, **arguments, placement="ray")
