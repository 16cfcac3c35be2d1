"""Settings of the browse tool, and what brings it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from treegraft.parts import Registry, Settings, setting


class BrowseToolSettings(Settings):
    """Settings of the browse tool."""

    allow_private: bool = setting(False, acts="sends")
    """Also fetch from addresses that are not global unicast: loopback, private, link-local, and
    IPv6 that embeds an IPv4 address, which a network with NAT64 may need."""


def _needs(config: Any) -> Iterator[tuple[str, str]]:
    if "browse" in config.tools.use:
        yield "tools.use: 'browse'", "protego pypdf trafilatura bm25s"


def register(registry: Registry) -> None:
    """Registers the browse tool."""
    registry.tool(
        "browse",
        "treegraft.extras.browse.tool:browse_tool",
        table=BrowseToolSettings,
        needs=_needs,
    )
