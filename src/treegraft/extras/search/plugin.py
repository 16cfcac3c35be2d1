"""What brings searches over a corpus, by servers and in the web; the providers of the latter."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from treegraft.parts import Finding, Registry


@dataclass(frozen=True, slots=True)
class Provider:
    """How to ask a provider, and where its answer has title, address and text."""

    key_variable: str
    """Environment variable of the API key."""
    base_url: str
    request: tuple[str, str, str, str]
    """Method, path, and the parameters for the query and the number of results; in the body of a
    POST, in the address of a GET."""
    key_header: tuple[str, str]
    """Name of the header with the key, and its text in front of the key."""
    results: tuple[str, ...]
    """Keys that lead to the list of results."""
    fields: tuple[str, str, str]
    """Of a result: title, address and text."""
    answer_box: str = ""
    """Key of a direct answer, which comes before the results; empty where there is none."""

    def read(self, answer: Any) -> Iterator[tuple[Any, Any, Any]]:
        """Yields title, address and text as the provider gave them."""
        title, address, text = self.fields
        if self.answer_box:
            # The direct answer to a question is often in none of the results.
            box = answer.get(self.answer_box) or {}
            # Serper has the one or the other, by the kind of question.
            if box.get("answer") or box.get("snippet"):
                yield box.get(title), box.get(address), box.get("answer") or box.get("snippet")
        found = answer
        for key in self.results:
            # A provider leaves out the whole branch where it found nothing.
            found = found.get(key) or {}
        for one in found:
            yield one.get(title), one.get(address), one.get(text)


PROVIDERS: Mapping[str, Provider] = {
    "serper": Provider(
        key_variable="SERPER_API_KEY",
        base_url="https://google.serper.dev",
        request=("POST", "/search", "q", "num"),
        key_header=("X-API-KEY", ""),
        results=("organic",),
        fields=("title", "link", "snippet"),
        answer_box="answerBox",
    ),
    "brave": Provider(
        key_variable="BRAVE_API_KEY",
        base_url="https://api.search.brave.com",
        request=("GET", "/res/v1/web/search", "q", "count"),
        key_header=("X-Subscription-Token", ""),
        results=("web", "results"),
        fields=("title", "url", "description"),
    ),
    "tavily": Provider(
        key_variable="TAVILY_API_KEY",
        base_url="https://api.tavily.com",
        request=("POST", "/search", "query", "max_results"),
        key_header=("Authorization", "Bearer "),
        results=("results",),
        fields=("title", "url", "content"),
    ),
}
"""By the name in [tools.search]."""


def _needs(config: Any) -> Iterator[tuple[str, str]]:
    search = config.tools.search
    if "search" not in config.tools.use:
        return
    if search.kind == "bm25":
        yield "tools.search.kind = 'bm25'", "bm25s"
    if search.kind == "dense":
        yield "tools.search.kind = 'dense'", "faiss"
        if search.encoder != "hashing":
            yield f"tools.search.encoder = '{search.encoder}'", "sentence_transformers"


def findings(config: Any) -> Iterator[Finding]:
    """The file, address or key that the search needs; no service gets a request."""
    search = config.tools.search
    if "search" not in config.tools.use:
        return
    if search.kind in ("bm25", "dense"):
        # Looked at alone: reading a corpus of 14 GB is no check.
        path = os.path.expanduser(os.path.expandvars(search.corpus))
        note = ""
        if "$" in path:
            note = f"set the environment variable in '{search.corpus}'"
        elif not os.access(path, os.R_OK):
            note = "does not exist or cannot be read" if path else "name a file"
        yield Finding("tools.search.corpus", path or "empty", not note, note)
    elif search.kind == "http":
        note = "" if search.url else "name a retrieval server"
        yield Finding("tools.search.url", search.url or "empty", bool(search.url), note)
    elif search.kind == "web":
        variable = PROVIDERS[search.provider].key_variable
        is_set = bool(os.environ.get(variable, "").strip())
        note = "" if is_set else f"set it to your key of {search.provider}"
        yield Finding(variable, "set" if is_set else "not set", is_set, note)


def register(registry: Registry) -> None:
    """Registers the sources of the search tool, and the command that serves a corpus."""
    for kind in ("bm25", "dense"):
        registry.part("search", kind, "treegraft.extras.search.local:corpus_search")
    registry.part(
        "search",
        "http",
        "treegraft.extras.search.remote:remote_search",
        settings={"tools.search": "treegraft.extras.search.settings:SearchTables"},
        needs=_needs,
    )
    registry.part("search", "web", "treegraft.extras.search.web:web_search")
    registry.command(
        "serve", "treegraft.extras.search.command:serve_app", help="Run servers for agents."
    )
    registry.part("finding", "search", findings)
