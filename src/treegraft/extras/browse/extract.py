"""Passages out of pages, in child processes: a page may be made to hang or flood its reader."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path

from treegraft import ToolError, ToolUnavailable, TreegraftError
from treegraft.extras.browse.fetch import SHOWN_CHARS, Page
from treegraft.parts import WorkerPool, plain

NUM_WORKERS = 2
"""Processes that read pages: a page costs them some hundredths of a second."""
READ_TIMEOUT_S = 20.0
"""Longest time to read a page's text and choose passages, as long as fetching it may take."""
NUM_PASSAGES = 3
"""Passages returned, those that match the query best: about 500 tokens with `PASSAGE_CHARS`."""
PASSAGE_CHARS = 600
"""Length of a passage."""


@dataclass(frozen=True, slots=True)
class Found:
    """Found(title="Paris", passages=("Paris is the capital of France.", "[...]"))"""

    title: str
    """Empty where the page has none."""
    passages: tuple[str, ...]
    """In their order, with marks in place of others; empty where the page has no text."""


class ExtractPool(WorkerPool):
    """Child processes that read pages; safe for many threads."""

    def __init__(self) -> None:
        """Starts the first process in the background: that needs seconds."""
        script = Path(__file__).with_name("worker.py")
        super().__init__(script, NUM_WORKERS, task="reads pages", package="trafilatura")
        # trafilatura imports slowly.
        self.start()

    def read(self, page: Page, query: str) -> Found:
        """Returns a page's title and the passages of it that match the query best.

        Raises:
            ToolError: it cannot be read, or not within `READ_TIMEOUT_S` seconds.
            ToolUnavailable: no process became free or could be started.
        """
        url = plain(page.url, SHOWN_CHARS)
        # Requests go as JSON, which has no bytes.
        body = base64.b64encode(page.body).decode("ascii")
        request = [
            page.content_type,
            page.charset,
            page.url,
            body,
            query,
            NUM_PASSAGES,
            PASSAGE_CHARS,
        ]
        try:
            answer = self.ask(request, READ_TIMEOUT_S)
        except TreegraftError as error:
            raise ToolUnavailable(str(error), code="extract-failed") from error
        if answer is None:
            raise ToolError(
                f"{url} could not be read within {READ_TIMEOUT_S:g} s", code="page-late"
            )
        if "error" in answer:
            raise ToolError(f"{url} could not be read: {answer['error']}", code="page-unreadable")
        return Found(answer["title"], tuple(answer["passages"]))
