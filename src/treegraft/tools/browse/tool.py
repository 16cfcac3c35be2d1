"""The browse tool: fetches a page and shows its passages that match a query."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
from collections.abc import Iterator

from treegraft.core.errors import SettingError, ToolError
from treegraft.core.interfaces import Capability, Signature
from treegraft.core.types import Task
from treegraft.settings.tools import BrowseToolSettings
from treegraft.tools.browse.extract import ExtractPool, Text
from treegraft.tools.browse.fetch import Fetcher
from treegraft.tools.own_thread import run_in_thread
from treegraft.tools.search.lexical import best_texts

GAP = "[...]"
"""Stands where passages of a page were left out."""


class BrowseTool:
    """Fetches a web page or a PDF, reads its text, and shows the passages that match a query
    best."""

    name = "browse"
    description = (
        "Opens a web page or a PDF and shows the passages of it that matter. Write the address, a"
        " space, and what you are looking for; without that the page's beginning is shown."
    )
    signature = Signature.of_text("page", "The address, a space, and what you are looking for.")
    capability = Capability.STATELESS
    cacheable = True
    is_remote = True

    def __init__(self, settings: BrowseToolSettings) -> None:
        """Starts the first process that reads pages.

        Raises `SettingError` where a package is missing.
        """
        # Looked up without an import, which only the child processes need.
        for package in ("protego", "pypdf", "trafilatura"):
            if importlib.util.find_spec(package) is None:
                raise SettingError(
                    f"tools.use: 'browse' needs the package '{package}', which is not installed;"
                    " run: pip install 'treegraft[web]'"
                )
        self._settings = settings
        self._fetcher = Fetcher(settings)
        self._pool = ExtractPool(settings.num_workers)

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
        found = await run_in_thread(lambda: self._pool.read(page, self._settings.timeout_s))
        return await asyncio.to_thread(self._show, page.url, found, query)

    async def close(self) -> None:
        """Ends the processes."""
        await asyncio.to_thread(self._pool.close)

    def _show(self, url: str, found: Text, query: str) -> str:
        passages = list(cut(found.text, self._settings.passage_chars))
        head = f"{' '.join(found.title.split())} | {url}" if found.title else url
        if not passages:
            return f"{head}\n(no text)"
        shown, last = [], -1
        for number in most_relevant(passages, query, self._settings.num_passages):
            if number != last + 1:
                shown.append(GAP)
            shown.append(passages[number])
            last = number
        if last + 1 < len(passages):
            shown.append(GAP)
        return "\n".join([head, *shown])


def read_call(body: str) -> tuple[str, str]:
    """Returns address and query of a call: "ADDRESS QUERY", or JSON with "url" and "query".

    Raises:
        ToolError: there is no address.
    """
    text = body.strip()
    if text.startswith("{"):
        try:
            fields = json.loads(text)
            url, query = fields["url"], fields.get("query") or ""
        except (ValueError, RecursionError, KeyError) as error:
            raise ToolError(
                'browse needs an address, a space and a query, or JSON: {"url": ..., "query": ...}'
            ) from error
    else:
        url, *rest = re.split(r"[ \n]", text, maxsplit=1)
        query = "".join(rest)
    # Addresses copied out of a text come in brackets or quotes.
    url = str(url).strip("<>\"'")
    if not url:
        raise ToolError(
            "the address is empty; write an address, a space, and what you are looking for"
        )
    # Agents leave the scheme out, as people do.
    if "://" not in url and re.match(r"[\w-]+(\.[\w-]+)+(/|$|:\d)", url):
        url = f"https://{url}"
    return url, " ".join(str(query).split())


def cut(text: str, max_chars: int) -> Iterator[str]:
    """Yields the text in pieces of at most `max_chars` characters, cut at ends of paragraphs,
    sentences or words."""
    piece = ""
    for part in _parts(text, max_chars):
        if piece and len(piece) + 1 + len(part) > max_chars:
            yield piece
            piece = ""
        piece = f"{piece} {part}" if piece else part
    if piece:
        yield piece


def _parts(text: str, max_chars: int) -> Iterator[str]:
    for line in text.splitlines():
        # Chinese sentences end without a space behind them.
        for sentence in re.split(r"(?<=[.!?])\s+|(?<=[。！？])", " ".join(line.split())):
            rest = sentence
            while len(rest) > max_chars:
                # A space just behind the limit ends a word too.
                space = rest.rfind(" ", 0, max_chars + 1)
                place = space if space > 0 else max_chars
                yield rest[:place]
                rest = rest[place:].lstrip()
            if rest:
                yield rest


def most_relevant(passages: list[str], query: str, num: int) -> list[int]:
    """Returns the numbers of the passages that match the query best by BM25, ascending; the first
    ones where none does."""
    return sorted(best_texts(passages, query, num)) or list(range(min(num, len(passages))))
