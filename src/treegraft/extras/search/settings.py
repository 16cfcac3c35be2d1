"""Settings of searches by servers and in the web."""

from __future__ import annotations

from typing import Literal

from treegraft.parts import Settings, setting, when


class SearchTables(Settings):
    """What joins the table [tools.search]."""

    url: str = setting("", acts="sends", idle_unless=when("tools.search.kind", "http"))
    """For "http": the server, such as http://127.0.0.1:8000/retrieve."""
    provider: Literal["serper", "brave", "tavily"] = setting(
        "serper", idle_unless=when("tools.search.kind", "web")
    )
    """For "web": whose results; the key is read from SERPER_API_KEY, BRAVE_API_KEY or
    TAVILY_API_KEY."""
    base_url: str = setting("", acts="sends", idle_unless=when("tools.search.kind", "web"))
    """For "web": address of the provider or of a proxy that answers like it; empty means the
    provider's own."""
    timeout_s: float = setting(20.0, gt=0, idle_unless=when("tools.search.kind", "http", "web"))
    """For "http" and "web": longest wait for one answer, in seconds."""
