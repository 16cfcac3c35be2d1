"""Search in the web through the interface of a provider."""

from __future__ import annotations

import asyncio
import html
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treegraft.core.addresses import expanded, redacted
from treegraft.core.errors import SettingError, ToolUnavailable, nearest
from treegraft.tools.search.corpus import Passage
from treegraft.tools.search.service import Service, is_http

MAX_RESULTS = 20
"""More are not asked for at once."""


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
            # The direct answer to a question often stands in none of the results.
            box = answer.get(self.answer_box) or {}
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


class WebSearch(Service):
    """Search by one provider; a result is shown as title, address and text."""

    def __init__(self, provider: str, *, base_url: str = "", timeout_s: float = 20.0) -> None:
        """Args:
            base_url: the server that answers like the provider; empty means the provider's own.

        Raises:
            SettingError: an unknown provider, no key in the environment, or a base URL that is no
                address.
        """
        if provider not in PROVIDERS:
            raise SettingError(
                f"tools.search.provider: got '{provider}', expected one of"
                f" {', '.join(PROVIDERS)}.{nearest(provider, PROVIDERS)}"
            )
        self._provider = chosen = PROVIDERS[provider]
        base = expanded(base_url, "tools.search.base_url").strip() or chosen.base_url
        if not is_http(base):
            raise SettingError(
                f"tools.search.base_url: got {redacted(base_url)!r}, expected an address such as"
                f" {chosen.base_url}."
            )
        key = os.environ.get(chosen.key_variable, "").strip()
        if not key:
            raise SettingError(
                f"tools.search.provider is '{provider}', but the environment variable"
                f" {chosen.key_variable} is not set; set it to your API key."
            )
        # Checked here, since the error of the HTTP client would show the key.
        if not (key.isascii() and key.isprintable()):
            raise SettingError(
                f"the environment variable {chosen.key_variable} holds characters that no API key"
                " has."
            )
        super().__init__(f"the search provider '{provider}'", timeout_s=timeout_s, use_proxy=True)
        self._url = base.rstrip("/") + chosen.request[1]
        header, prefix = chosen.key_header
        self._headers = {header: prefix + key, "Accept": "application/json"}

    @property
    def fingerprint(self) -> str:
        """The provider's address; results also change with the web, which it does not tell."""
        return f"web {redacted(self._url)}"

    async def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """Returns for each query its results, in the provider's order, as "title | address | text".

        Raises:
            ToolUnavailable: the provider is down, busy or refuses the key, or its answer has
                another shape.
            ToolError: it refuses the query.
        """
        # Providers take one query per request.
        return list(await asyncio.gather(*(self._search(query, top_k) for query in queries)))

    async def _search(self, query: str, top_k: int) -> list[Passage]:
        method, _, query_key, num_key = self._provider.request
        asked = {query_key: query, num_key: min(top_k, MAX_RESULTS)}
        place = "json" if method == "POST" else "params"
        answer = await self.ask(method, self._url, headers=self._headers, **{place: asked})
        try:
            found = [tuple(map(_plain, result)) for result in self._provider.read(answer)][:top_k]
        except (AttributeError, TypeError, KeyError) as error:
            raise ToolUnavailable(
                f"{self.name} answered in another shape than expected: {error!r}"
            ) from error
        # Providers give no scores; the rank stands in for one.
        return [
            Passage(address, " | ".join(part for part in (title, address, text) if part), 1 / rank)
            for rank, (title, address, text) in enumerate(found, start=1)
        ]


def _plain(text: Any) -> str:
    """Returns the text without the markup that some providers set around found words."""
    bare = re.sub(r"</?(?:strong|b|em|i|mark)\b[^<>]{0,80}>", "", str(text or ""))
    return " ".join(html.unescape(bare).split())
