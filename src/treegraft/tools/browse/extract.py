"""Text out of pages, in child processes: a page may be made to hang or flood its reader."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path

from treegraft.core.errors import ToolError, ToolUnavailable, TreegraftError
from treegraft.core.workers import WorkerPool
from treegraft.tools.browse.fetch import Page


@dataclass(frozen=True, slots=True)
class Text:
    """Text(title="Paris", text="Paris is the capital of France.")"""

    title: str
    """Empty where the page has none."""
    text: str


class ExtractPool(WorkerPool):
    """Child processes that read pages; safe for many threads."""

    def __init__(self, num_workers: int) -> None:
        """Starts the first process in the background, since that takes seconds."""
        script = Path(__file__).with_name("worker.py")
        super().__init__(script, num_workers, task="reads pages", package="trafilatura")
        self.start()

    def read(self, page: Page, deadline_s: float) -> Text:
        """Returns a page's text.

        Raises:
            ToolError: it cannot be read, or not within `deadline_s` seconds.
            ToolUnavailable: no process became free or could be started.
        """
        # Requests go as JSON, which has no bytes.
        body = base64.b64encode(page.body).decode("ascii")
        try:
            answer = self.ask([page.content_type, page.charset, page.url, body], deadline_s)
        except TreegraftError as error:
            raise ToolUnavailable(str(error)) from error
        if answer is None:
            raise ToolError(f"{page.url} could not be read within {deadline_s:g} s")
        if "error" in answer:
            raise ToolError(f"{page.url} could not be read: {answer['error']}")
        return Text(answer["title"], answer["text"])
