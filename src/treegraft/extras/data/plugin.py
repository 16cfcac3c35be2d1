"""The commands that inspect data sets."""

from __future__ import annotations

from treegraft.parts import Command, Plugin

plugin = Plugin(
    name="data",
    commands={
        "data": Command(
            path="treegraft.extras.data.command:data_app", help="Inspect data before using it."
        )
    },
)
