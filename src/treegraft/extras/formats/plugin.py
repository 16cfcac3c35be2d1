"""The command that writes a run's trees in the formats of other projects."""

from __future__ import annotations

from treegraft.parts import Command, Plugin

plugin = Plugin(
    name="formats",
    commands={
        "export": Command(
            path="treegraft.extras.formats.command:export",
            help="Write the trees of a run in the format of another project.",
        )
    },
)
