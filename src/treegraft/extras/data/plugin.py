"""The commands that inspect data sets, and what doctor says of gold traces."""

from __future__ import annotations

from treegraft.parts import Command, Plugin

plugin = Plugin(
    name="data",
    commands={
        "data": Command(
            path="treegraft.extras.data.command:data_app", help="Inspect data before using it."
        )
    },
    trials={"gold traces": "treegraft.extras.data.replay:replayed"},
)
