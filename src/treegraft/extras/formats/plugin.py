"""The markup of other agents, and the command that writes a run's trees for Inspect."""

from __future__ import annotations

from treegraft.parts import Registry

_HERE = "treegraft.extras.formats"


def register(registry: Registry) -> None:
    """Registers the markup of other agents, and the export of trees."""
    registry.part("format", "search-r1", f"{_HERE}.search_agents:search_r1")
    registry.part("format", "search-o1", f"{_HERE}.search_agents:search_o1")
    registry.command(
        "export",
        f"{_HERE}.command:export",
        help="Write the trees of a run as evaluation logs of Inspect.",
    )
