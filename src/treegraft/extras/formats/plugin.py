"""The markup of other agents, and the command that writes a run's trees in the formats of other
projects."""

from __future__ import annotations

from treegraft.parts import Command, Plugin

plugin = Plugin(
    name="formats",
    formats={
        "search-r1": "treegraft.extras.formats.search_agents:search_r1",
        "search-o1": "treegraft.extras.formats.search_agents:search_o1",
    },
    commands={
        "export": Command(
            path="treegraft.extras.formats.command:export",
            help="Write the trees of a run in the format of another project.",
        )
    },
)
