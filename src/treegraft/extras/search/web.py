"""Search in the web through the interface of a provider."""

from __future__ import annotations

import asyncio
import html
import os
import re
from collections.abc import Sequence
from typing import Any

from treegraft import SettingError, ToolUnavailable
from treegraft.extras.search.plugin import PROVIDERS
from treegraft.extras.search.service import ANSWER_S, Service, is_http
from treegraft.parts import addresses, errors, interfaces

MAX_RESULTS = 20
"""Most results of one request."""


class WebSearch(Service):
    """Search by one provider; a result is a title, an address and a text."""

    def __init__(self, provider: str, *, base_url: str = "") -> None:
        """Args:
            base_url: the server that answers like the provider; empty means the provider's own.

        Raises:
            SettingError: an unknown provider, no key in the environment, or a base URL that is no
                address.
        """
        if provider not in PROVIDERS:
            raise SettingError(
                f"tools.search.provider: got '{provider}', expected one of"
                f" {', '.join(PROVIDERS)}.{errors.nearest(provider, PROVIDERS)}",
                code="unknown-provider",
            )
        self._provider = chosen = PROVIDERS[provider]
        base = addresses.expanded(base_url, "tools.search.base_url").strip() or chosen.base_url
        if not is_http(base):
            raise SettingError(
                f"tools.search.base_url: got {addresses.redacted(base_url)!r}, expected an"
                f" address such as {chosen.base_url}.",
                code="address-invalid",
            )
        key = os.environ.get(chosen.key_variable, "").strip()
        if not key:
            raise SettingError(
                f"tools.search.provider is '{provider}', but the environment variable"
                f" {chosen.key_variable} is not set; set it to your API key.",
                code="key-unset",
            )
        # Checked here, since the error of the HTTP client would show the key.
        if not (key.isascii() and key.isprintable()):
            raise SettingError(
                f"the environment variable {chosen.key_variable} holds characters that no API key"
                " has.",
                code="key-invalid",
            )
        super().__init__(f"the search provider '{provider}'", timeout_s=ANSWER_S, use_proxy=True)
        self._url = base.rstrip("/") + chosen.request[1]
        header, prefix = chosen.key_header
        self._headers = {header: prefix + key, "Accept": "application/json"}

    @property
    def fingerprint(self) -> str:
        """The provider's address; results also change with the web, which it does not tell."""
        return f"web {addresses.redacted(self._url)}"

    async def search(self, queries: Sequence[str], top_k: int) -> list[list[interfaces.Passage]]:
        """Returns for each query its results, in the provider's order, as "title | address | text".

        Raises:
            ToolUnavailable: the provider is down, busy or refuses the key, or its answer has
                another shape.
            ToolError: it refuses the query.
        """
        # Providers take one query per request.
        return list(await asyncio.gather(*(self._search(query, top_k) for query in queries)))

    async def _search(self, query: str, top_k: int) -> list[interfaces.Passage]:
        method, _, query_key, num_key = self._provider.request
        asked = {query_key: query, num_key: min(top_k, MAX_RESULTS)}
        place = "body" if method == "POST" else "params"
        answer = await self.ask(method, self._url, headers=self._headers, **{place: asked})
        try:
            found = [tuple(map(_plain, result)) for result in self._provider.read(answer)][:top_k]
        except (AttributeError, TypeError, KeyError) as error:
            raise ToolUnavailable(
                f"{self.name} answered in another shape than expected: {error!r}",
                code="service-other-shape",
            ) from error
        passages = []
        for rank, (title, address, text) in enumerate(found, start=1):
            shown = " | ".join(filter(None, (title, address, text)))
            # Providers give no scores; the rank replaces one.
            passages.append(interfaces.Passage(address, shown, 1 / rank))
        return passages


def _plain(text: Any) -> str:
    """Returns the text without the markup that some providers set around found words."""
    bare = re.sub(r"</?(?:strong|b|em|i|mark)\b[^<>]{0,80}>", "", str(text or ""))
    return " ".join(html.unescape(bare).split())


def web_search(search: Any) -> WebSearch:
    """Returns the search that [tools.search] asks for. Raises as `WebSearch`."""
    return WebSearch(search.provider, base_url=search.base_url)
