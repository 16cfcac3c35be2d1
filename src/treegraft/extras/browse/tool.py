"""The browse tool: the passages of a page that match a query."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

from treegraft import Task, ToolError
from treegraft.extras.browse.extract import ExtractPool
from treegraft.extras.browse.fetch import SHOWN_CHARS, Fetcher
from treegraft.extras.browse.plugin import BrowseToolSettings
from treegraft.parts import interfaces, packages, plain, run_in_thread


class BrowseTool:
    """Passages of a web page or a PDF, those that match a query best."""

    name = "browse"
    description = (
        "Opens a web page or a PDF and shows the passages of it that matter. Write the address, a"
        " space, and what you are looking for; without that the page's beginning is shown."
    )
    signature = interfaces.Signature.of_text(
        "page", "The address, a space, and what you are looking for."
    )
    capability = interfaces.Capability.STATELESS
    cacheable = True
    is_remote = True

    def __init__(self, settings: BrowseToolSettings) -> None:
        """Starts the first process that reads pages.

        Raises `SettingError` where a package is missing.
        """
        # Looked up without an import, which only the child processes need.
        packages.require("tools.use: 'browse'", "protego", "pypdf", "trafilatura", "bm25s")
        self._settings = settings
        self._fetcher = Fetcher(settings)
        self._pool = ExtractPool()

    @property
    def fingerprint(self) -> str:
        """The settings; results also change with the web, which they do not tell."""
        return f"browse {self._settings.model_dump_json()}"

    async def __call__(self, body: str, task: Task) -> str:
        """Returns title and address on one line, then the best passages in the order of the page.

        Raises `ToolError` for a page that cannot be fetched or read, `ToolUnavailable` where no
        process can read pages.
        """
        url, query = read_call(body)
        page = await self._fetcher.fetch(url)
        # A thread of its own: a page that hangs its reader would hold one of the few shared ones.
        found = await run_in_thread(lambda: self._pool.read(page, query))
        url = plain(page.url, SHOWN_CHARS)
        title = plain(" ".join(found.title.split()), SHOWN_CHARS)
        head = f"{title} | {url}" if title else url
        return "\n".join([head, *(found.passages or ["(no text)"])])

    async def close(self) -> None:
        """Ends the processes."""
        await asyncio.to_thread(self._pool.close)


def read_call(body: str) -> tuple[str, str]:
    """Returns address and query of a call: "ADDRESS QUERY", or JSON with "url" and "query".

    Raises:
        ToolError: there is no address.
    """
    text = body.strip()
    if text.startswith("{"):
        try:
            fields = json.loads(text)
            url = fields["url"]
            query = fields.get("query") or ""
        except (ValueError, RecursionError, KeyError) as error:
            raise ToolError(
                'browse needs an address, a space and a query, or JSON: {"url": ..., "query": ...}',
                code="browse-arguments",
            ) from error
    else:
        url, *rest = re.split(r"[ \n]", text, maxsplit=1)
        query = "".join(rest)
    # Addresses copied out of a text come in brackets or quotes.
    url = str(url).strip("<>\"'")
    if not url:
        raise ToolError(
            "the address is empty; write an address, a space, and what you are looking for",
            code="address-empty",
        )
    # Agents leave the scheme out, as people do.
    if "://" not in url and re.match(r"[\w-]+(\.[\w-]+)+(/|$|:\d)", url):
        url = f"https://{url}"
    return url, " ".join(str(query).split())


def browse_tool(settings: Any) -> BrowseTool:
    """Returns the tool of a table [tools]."""
    return BrowseTool(settings.browse)
