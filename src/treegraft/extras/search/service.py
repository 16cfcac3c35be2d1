"""Asks a web service for JSON: one attempt, within limits of time and size, with errors that tell
the agent's faults from the service's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx

from treegraft import ToolError, ToolUnavailable

ANSWER_S = 60.0
"""Longest wait for a whole answer; tools.deadline_s, 30 by default, ends the call before."""
MAX_BYTES = 10_000_000
"""Longest answer that is read, in bytes after decompression."""
_AGENTS_FAULT = (400, 413, 414, 422)
_HINTS = {
    401: " (check the API key)",
    402: " (no credit left)",
    403: " (check the API key)",
    429: " (too many requests)",
}


class Service:
    """One service over HTTP. Connections last as long as an event loop."""

    is_remote = True

    def __init__(
        self, name: str, *, timeout_s: float, use_proxy: bool, refusals_are_ours: bool = False
    ) -> None:
        """Args:
        name: its name in messages.
        timeout_s: longest wait for a whole answer, in seconds.
        use_proxy: whether HTTP_PROXY and similar variables are followed.
        refusals_are_ours: whether a refused request (400, 422) is our mistake rather than the
            agent's.
        """
        self.name = name
        self._timeout_s = timeout_s
        self._use_proxy = use_proxy
        self._refusals_are_ours = refusals_are_ours
        self._client: tuple[asyncio.AbstractEventLoop, httpx.AsyncClient] | None = None

    async def ask(
        self,
        method: str,
        url: str,
        *,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> Any:
        """Returns the JSON of the answer.

        Args:
            body: of the request, sent as JSON; None for a request without one.

        Raises:
            ToolUnavailable: no connection, no whole answer in time, a busy or broken service, a
                refused key, or no JSON.
            ToolError: the service refuses this request.
        """
        received = bytearray()
        sent = dict(headers or {})
        # httpx's own JSON cannot hold half a surrogate pair, such as a cut emoji.
        content = None if body is None else json.dumps(body).encode()
        if content is not None:
            sent["Content-Type"] = "application/json"
        try:
            # One limit for the whole answer: httpx's own starts again with every chunk.
            async with (
                asyncio.timeout(self._timeout_s),
                self._connection().stream(
                    method, url, params=params, headers=sent, content=content
                ) as response,
            ):
                async for chunk in response.aiter_bytes():
                    received += chunk
                    if len(received) > MAX_BYTES:
                        raise ToolUnavailable(
                            f"{self.name} answered with more than {MAX_BYTES:,} bytes",
                            code="service-too-long",
                        )
        except TimeoutError:
            raise ToolUnavailable(
                f"{self.name} did not answer within {self._timeout_s:g} s", code="service-late"
            ) from None
        except httpx.HTTPError as error:
            raise ToolUnavailable(
                f"{self.name} cannot be reached: {str(error) or type(error).__name__}",
                code="service-not-reached",
            ) from error
        # The answer goes into messages that an agent may read: one line of it is enough.
        beginning = " ".join(received[:400].decode("utf-8", "replace").split())[:200]
        status = response.status_code
        if status in _AGENTS_FAULT and not self._refusals_are_ours:
            raise ToolError(
                f"{self.name} refuses the query: {status} {beginning}".strip(),
                code="service-refuses",
            )
        # Redirects too: a POST that follows one would become a GET.
        if status != 200:
            raise ToolUnavailable(
                f"{self.name} answered with an error{_HINTS.get(status, '')}:"
                f" {status} {beginning}".strip(),
                code="service-failed",
            )
        try:
            return json.loads(received)
        except (ValueError, RecursionError) as error:
            raise ToolUnavailable(
                f"{self.name} gave an answer that is not JSON: {beginning}", code="service-no-json"
            ) from error

    async def close(self) -> None:
        """Closes the connections."""
        if self._client is not None:
            loop, client = self._client
            self._client = None
            # Sockets of a loop that is over can only be left to the garbage collector.
            if loop is asyncio.get_running_loop():
                await client.aclose()

    def _connection(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        # A pooled socket works only in the loop that opened it, and a run may have several loops.
        if self._client is None or self._client[0] is not loop:
            client = httpx.AsyncClient(
                timeout=None, limits=httpx.Limits(max_connections=64), trust_env=self._use_proxy
            )
            self._client = (loop, client)
        return self._client[1]


def is_http(url: str) -> bool:
    """Returns whether this is an http(s) address with a host."""
    try:
        parts = urlsplit(url)
    except ValueError:  # such as an unclosed bracket of an IPv6 address
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)
