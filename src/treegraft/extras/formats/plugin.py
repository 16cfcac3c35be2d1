"""The markup of other agents, and templates by the package renderers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from treegraft.parts import Registry

_HERE = "treegraft.extras.formats"


def register(registry: Registry) -> None:
    """Registers both."""
    registry.part("format", "search-r1", f"{_HERE}.search_agents:search_r1")
    registry.part("format", "search-o1", f"{_HERE}.search_agents:search_o1")
    registry.part("format", "renderer", f"{_HERE}.rendered:RendererFormat", needs=_needs)


def _needs(config: Any) -> Iterable[tuple[str, str]]:
    if config.format.kind == "renderer":
        yield "format.kind = 'renderer'", "renderers"
