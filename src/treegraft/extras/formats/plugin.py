"""The markup of other agents."""

from __future__ import annotations

from treegraft.parts import Registry

_HERE = "treegraft.extras.formats"


def register(registry: Registry) -> None:
    """Registers the markup of other agents."""
    registry.part("format", "search-r1", f"{_HERE}.search_agents:search_r1")
    registry.part("format", "search-o1", f"{_HERE}.search_agents:search_o1")
