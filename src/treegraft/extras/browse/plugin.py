"""Settings of the browse tool, and what brings it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from treegraft.parts import Registry, Settings, setting


class BrowseToolSettings(Settings):
    """Settings of the browse tool."""

    timeout_s: float = setting(20.0, gt=0)
    """Longest time to fetch a page, redirects and robots.txt included, in seconds; as long again to
    read its text and choose passages."""
    max_bytes: int = setting(5_000_000, ge=1024)
    """Largest page, in bytes, after decompression."""
    max_redirects: int = setting(5, ge=0)
    """Redirects followed."""
    num_passages: int = setting(3, ge=1)
    """Passages of the page returned, those that match the query best."""
    passage_chars: int = setting(600, ge=50)
    """Length of a passage, in characters."""
    allow_private: bool = setting(False, acts="sends")
    """Also fetch from addresses that are not global unicast: loopback, private, link-local, and
    IPv6 that embeds an IPv4 address, which a network with NAT64 may need."""
    respect_robots: bool = True
    """Leave alone the pages that a site's robots.txt forbids."""
    user_agent: str = setting("Treegraft", acts="nothing", min_length=1)
    """How the tool introduces itself to sites, and the name it looks for in robots.txt."""
    num_workers: int = setting(2, ge=1)
    """Processes that read text out of pages."""


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
