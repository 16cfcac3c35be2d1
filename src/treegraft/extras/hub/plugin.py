"""The command that uploads a checkpoint."""

from __future__ import annotations

from treegraft.parts import Registry


def register(registry: Registry) -> None:
    """Registers the command that uploads a checkpoint."""
    registry.command(
        "push",
        "treegraft.extras.hub.push:push",
        help="Upload a checkpoint and its model card to a hub.",
    )
