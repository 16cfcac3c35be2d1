"""Passages out of pages, in child processes: a page may be made to hang or flood its reader."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path

from treegraft import ToolError, ToolUnavailable, TreegraftError
from treegraft.extras.browse.fetch import SHOWN_CHARS, Page
from treegraft.extras.browse.plugin import BrowseToolSettings
from treegraft.parts import WorkerPool, plain


@dataclass(frozen=True, slots=True)
class Found:
    """Found(title="Paris", passages=("Paris is the capital of France.", "[...]"))"""

    title: str
    """Empty where the page has none."""
    passages: tuple[str, ...]
    """In their order, with marks where others stood; empty where the page has no text."""


class ExtractPool(WorkerPool):
    """Child processes that read pages; safe for many threads."""

    def __init__(self, settings: BrowseToolSettings) -> None:
        """Starts the first process in the background, since that takes seconds."""
        script = Path(__file__).with_name("worker.py")
        super().__init__(script, settings.num_workers, task="reads pages", package="trafilatura")
        self._settings = settings
        self.start()

    def read(self, page: Page, query: str) -> Found:
        """Returns a page's title and the passages of it that match the query best.

        Raises:
            ToolError: it cannot be read, or not within `timeout_s` seconds.
            ToolUnavailable: no process became free or could be started.
        """
        settings, url = self._settings, plain(page.url, SHOWN_CHARS)
        # Requests go as JSON, which has no bytes.
        body = base64.b64encode(page.body).decode("ascii")
        request = [
            *(page.content_type, page.charset, page.url, body),
            *(query, settings.num_passages, settings.passage_chars),
        ]
        try:
            answer = self.ask(request, settings.timeout_s)
        except TreegraftError as error:
            raise ToolUnavailable(str(error), code="extract-failed") from error
        if answer is None:
            raise ToolError(
                f"{url} could not be read within {settings.timeout_s:g} s", code="page-late"
            )
        if "error" in answer:
            raise ToolError(f"{url} could not be read: {answer['error']}", code="page-unreadable")
        return Found(answer["title"], tuple(answer["passages"]))
