"""The search tool, over any source of passages."""

from __future__ import annotations

from treegraft.core.errors import ToolError
from treegraft.core.import_paths import blaming
from treegraft.core.interfaces import Capability, SearchBackend, Signature
from treegraft.core.registry import find
from treegraft.core.types import Task
from treegraft.settings.tools import SearchToolSettings

NO_MATCH = "No passage matches the query."
"""The tool's result when nothing was found."""


class SearchTool:
    """Finds the passages that best match a query."""

    name = "search"
    description = "Searches a collection of texts and shows the passages that best match the query."
    signature = Signature.of_text("query", "What to look for.")
    capability = Capability.STATELESS
    # By its fingerprint: another corpus has another one.
    cacheable = True

    def __init__(self, backend: SearchBackend, *, top_k: int = 3) -> None:
        """Args:
        backend: the source of passages, closed with the tool.
        top_k: passages returned by one search, at most.
        """
        self.backend = backend
        self.top_k = top_k

    @property
    def is_remote(self) -> bool:
        """Whether a service elsewhere answers."""
        return self.backend.is_remote

    @property
    def fingerprint(self) -> str:
        """Names everything but the query that results depend on."""
        return f"{self.backend.fingerprint}, top {self.top_k}"

    async def __call__(self, body: str, task: Task) -> str:
        """Returns one "Doc N: ..." line per passage, best first; equal scores in the order of the
        corpus.

        Raises `ToolError` for an empty query, and the errors of the backend.
        """
        query = body.strip()
        if not query:
            raise ToolError("the search query is empty", code="query-empty")
        (found,) = await self.backend.search([query], self.top_k)
        # One line per passage, so that the agent can tell where the next begins.
        lines = [
            f"Doc {rank}: {' '.join(passage.contents.split())}"
            for rank, passage in enumerate(found, start=1)
        ]
        return "\n".join(lines) or NO_MATCH

    async def close(self) -> None:
        """Closes the backend."""
        await self.backend.close()


def search_tool(settings: SearchToolSettings) -> SearchTool:
    """Returns the tool over the source that `tools.search.kind` names; a server has answered by
    then.

    Raises `SettingError`, `DataError` and `ModelError` for a source that cannot be opened.
    """
    make = find(settings.kind, {}, "search", "tools.search.kind")
    with blaming(settings.kind, "tools.search.kind"):
        backend: SearchBackend = make(settings)
    return SearchTool(backend, top_k=settings.top_k)
