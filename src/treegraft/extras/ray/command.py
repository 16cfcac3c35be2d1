"""The command `treegraft cluster`: a run whose engines are actors of a Ray cluster."""

from __future__ import annotations

import treegraft
from treegraft.parts import commands


@commands.run_command
def cluster(asked: commands.RunAsked) -> None:
    """Train an agent with a recipe whose engines run on a Ray cluster, as its table [cluster] says.

    The run folder, and the trees in it, are those of `treegraft train`.
    """
    with asked.carried_out() as arguments:
        treegraft.train(asked.config, **arguments, placement="ray")
