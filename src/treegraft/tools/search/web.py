"""Search in the web, by the interface of a provider.

| provider | request | key in | results |
|---|---|---|---|
| serper | POST /search {"q", "num"} | X-API-KEY | organic[]: title, link, snippet; answerBox |
| brave | GET /res/v1/web/search?q&count | X-Subscription-Token | web.results[]: title, url, description |
| tavily | POST /search {"query", "max_results"} | Authorization: Bearer | results[]: title, url, content |
| bing | GET /v7.0/search?q&count | Ocp-Apim-Subscription-Key | webPages.value[]: name, url, snippet |

Bing's own interface was closed in 2025; others answer in its shape, by `base_url`.
"""

from __future__ import annotations

import asyncio
import html
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from treegraft.core.errors import SettingError, ToolUnavailable, nearest
from treegraft.tools.search.corpus import Passage
from treegraft.tools.search.service import Service

_Result = tuple[Any, Any, Any]
"""Title, address and text as the provider gave them."""


@dataclass(frozen=True, slots=True)
class Provider:
    """How to ask a provider and where its answer has what."""

    key_variable: str
    """Environment variable of the API key."""
    base_url: str
    path: str
    ask: Callable[[str, int], dict[str, Any]]
    """From query and number of results to the arguments of a request."""
    headers: Callable[[str], dict[str, str]]
    """From the key."""
    results: Callable[[Any], Iterator[_Result]]
    max_results: int = 20
    """More are not asked for at once."""


def _serper(answer: Any) -> Iterator[_Result]:
    box = answer.get("answerBox") or {}
    if box.get("answer") or box.get("snippet"):
        yield box.get("title"), box.get("link"), box.get("answer") or box.get("snippet")
    for one in answer.get("organic") or []:
        yield one.get("title"), one.get("link"), one.get("snippet")


def _brave(answer: Any) -> Iterator[_Result]:
    for one in (answer.get("web") or {}).get("results") or []:
        yield one.get("title"), one.get("url"), one.get("description")


def _tavily(answer: Any) -> Iterator[_Result]:
    for one in answer.get("results") or []:
        yield one.get("title"), one.get("url"), one.get("content")


def _bing(answer: Any) -> Iterator[_Result]:
    for one in (answer.get("webPages") or {}).get("value") or []:
        yield one.get("name"), one.get("url"), one.get("snippet")


PROVIDERS: Mapping[str, Provider] = {
    "serper": Provider(
        "SERPER_API_KEY",
        "https://google.serper.dev",
        "/search",
        lambda query, num: {"method": "POST", "json": {"q": query, "num": num}},
        lambda key: {"X-API-KEY": key},
        _serper,
    ),
    "brave": Provider(
        "BRAVE_API_KEY",
        "https://api.search.brave.com",
        "/res/v1/web/search",
        lambda query, num: {"method": "GET", "params": {"q": query, "count": num}},
        lambda key: {"X-Subscription-Token": key, "Accept": "application/json"},
        _brave,
    ),
    "tavily": Provider(
        "TAVILY_API_KEY",
        "https://api.tavily.com",
        "/search",
        lambda query, num: {"method": "POST", "json": {"query": query, "max_results": num}},
        lambda key: {"Authorization": f"Bearer {key}"},
        _tavily,
    ),
    "bing": Provider(
        "BING_API_KEY",
        "https://api.bing.microsoft.com",
        "/v7.0/search",
        lambda query, num: {"method": "GET", "params": {"q": query, "count": num}},
        lambda key: {"Ocp-Apim-Subscription-Key": key},
        _bing,
        50,
    ),
}
"""By the name in [tools.search]."""


class WebSearch:
    """Search by one provider; what it finds is shown as title, address and text."""

    is_remote = True

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
        self._provider = PROVIDERS[provider]
        base = base_url.strip() or self._provider.base_url
        if urlsplit(base).scheme not in ("http", "https") or not urlsplit(base).hostname:
            raise SettingError(
                f"tools.search.base_url: got {base_url!r}, expected an address such as"
                f" {self._provider.base_url}."
            )
        key = os.environ.get(self._provider.key_variable, "").strip()
        if not key:
            raise SettingError(
                f"tools.search.provider is '{provider}', but the environment variable"
                f" {self._provider.key_variable} is not set; set it to your API key."
            )
        if not (key.isascii() and key.isprintable()):
            raise SettingError(
                f"the environment variable {self._provider.key_variable} holds characters that no"
                " API key has."
            )
        self._url = base.rstrip("/") + self._provider.path
        self._headers = self._provider.headers(key)
        self._service = Service(
            f"the search provider '{provider}'", timeout_s=timeout_s, use_proxy=True
        )

    @property
    def fingerprint(self) -> str:
        """The provider's address; the web changes below it."""
        return f"web {self._url}"

    async def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """Returns for each query its results, in the provider's order, as "title | address | text".

        Raises:
            ToolUnavailable: the provider is down, busy or refuses the key, or its answer has
                another shape.
            ToolError: it refuses the query.
        """
        return list(await asyncio.gather(*(self._search(query, top_k) for query in queries)))

    async def close(self) -> None:
        """Closes the connections."""
        await self._service.close()

    async def _search(self, query: str, top_k: int) -> list[Passage]:
        request = self._provider.ask(query, min(top_k, self._provider.max_results))
        answer = await self._service.ask(url=self._url, headers=self._headers, **request)
        try:
            found = [tuple(map(_plain, result)) for result in self._provider.results(answer)][
                :top_k
            ]
        except (AttributeError, TypeError, KeyError) as error:
            raise ToolUnavailable(
                f"{self._service.name} answered in another shape than expected: {error!r}"
            ) from error
        return [
            Passage(address, " | ".join(part for part in (title, address, text) if part), 1 / rank)
            for rank, (title, address, text) in enumerate(found, start=1)
        ]


def _plain(text: Any) -> str:
    """Returns the text without the markup that some providers set around found words."""
    return " ".join(
        html.unescape(
            re.sub(r"</?(?:strong|b|em|i|mark)\b[^<>]{0,80}>", "", str(text or ""))
        ).split()
    )
