"""Search by a server that speaks Search-R1's retrieve protocol.

    POST /retrieve  {"queries": ["..."], "topk": 3, "return_scores": true}
    200             {"result": [[{"document": {"id": "12", "contents": "..."}, "score": 0.7}]]}

Without scores a server leaves out the outer object of a passage and gives the bare document; both
forms are read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from treegraft import SettingError, ToolError, ToolUnavailable
from treegraft.extras.search.service import ANSWER_S, Service, is_http
from treegraft.parts import addresses, interfaces, interrupt


def retrieve_url(url: str) -> str:
    """Returns the whole address; "/retrieve" is added where the setting names the server alone.

    Raises:
        SettingError: it is empty, or no http address.
    """
    url = url.strip()
    if not is_http(url):
        raise SettingError(
            f"tools.search.url: got {addresses.redacted(url)!r}, expected the address of a"
            " retrieval server, such as http://127.0.0.1:8000/retrieve.",
            code="address-invalid",
        )
    parts = urlsplit(url)
    return url if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/retrieve"


class RemoteSearch(Service):
    """Search by a retrieval server."""

    def __init__(self, url: str, *, timeout_s: float = ANSWER_S) -> None:
        """Raises `SettingError` where `url` is not an http address."""
        self._address = retrieve_url(addresses.expanded(url, "tools.search.url"))
        self.url = addresses.redacted(self._address)
        super().__init__(
            f"the retrieval server {self.url}",
            timeout_s=timeout_s,
            use_proxy=False,  # such servers run near the training, where no proxy leads
            refusals_are_ours=True,  # any string is a query of the protocol
        )

    @property
    def fingerprint(self) -> str:
        """The server's address; its corpus is not known here."""
        return f"retrieval server {self.url}"

    def check(self) -> None:
        """Asks it one question, so that a missing server is noticed before the work begins.

        Raises:
            SettingError: it cannot be reached or does not keep to the protocol.
        """

        async def ask() -> None:
            try:
                await self.search(["test"], 1)
            finally:
                # Ctrl-C cancels this coroutine; the connections are closed nevertheless.
                await asyncio.shield(self.close())

        try:
            interrupt.run_to_end(ask())
        except ToolError as error:
            raise SettingError(
                f"tools.search.url: {error}. Start one with `treegraft serve search CORPUS`, or"
                " correct the address.",
                code="search-not-there",
            ) from error

    async def search(self, queries: Sequence[str], top_k: int) -> list[list[interfaces.Passage]]:
        """Returns for each query its best passages, in the server's order.

        Raises:
            ToolUnavailable: no connection, no answer in time, or none in the protocol.
        """
        asked = {"queries": list(queries), "topk": top_k, "return_scores": True}
        answer = await self.ask("POST", self._address, body=asked)
        found = []
        try:
            for entries in answer["result"]:
                # Some servers return more than was requested.
                found.append([_passage(entry) for entry in entries[:top_k]])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ToolUnavailable(
                f"{self.name} does not keep to the protocol: {error!r}", code="search-protocol"
            ) from error
        if len(found) != len(queries):
            raise ToolUnavailable(
                f"{self.name} gave {len(found)} answers to {len(queries)} queries",
                code="search-answers-unequal",
            )
        return found


def _passage(entry: Any) -> interfaces.Passage:
    # Without scores the entry is the document itself.
    document = entry.get("document", entry)
    contents = document.get("contents")
    if contents is None:  # corpora with columns of their own
        title = f'"{document["title"]}"\n' if "title" in document else ""
        contents = title + document["text"]
    score = float(entry.get("score", 0.0)) if document is not entry else 0.0
    return interfaces.Passage(document.get("id", ""), str(contents), score)


def remote_search(search: Any) -> RemoteSearch:
    """Returns the search that [tools.search] asks for, whose server has answered by then. Raises
    as `RemoteSearch` and its `check`."""
    remote = RemoteSearch(search.url)
    remote.check()  # before the run, not at an agent's first question
    return remote
