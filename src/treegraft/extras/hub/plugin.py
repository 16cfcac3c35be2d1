"""The command that uploads a checkpoint."""

from __future__ import annotations

from treegraft.parts import Command, Plugin

plugin = Plugin(
    name="hub",
    commands={
        "push": Command(
            path="treegraft.extras.hub.command:push",
            help="Upload a checkpoint and its model card to a hub.",
        )
    },
)
