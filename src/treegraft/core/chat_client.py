"""A client of OpenAI-compatible chat endpoints, with retries."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from treegraft.core.addresses import expanded, redacted
from treegraft.core.errors import ModelError, SettingError
from treegraft.core.keyed import keyed_unit

if TYPE_CHECKING:
    import httpx

MAX_BACKOFF_S = 30.0
"""Longest wait before another request, in seconds, whatever the server asks for."""
_TRANSIENT = frozenset({408, 409, 425, 429})
"""Statuses besides 5xx after which the same request may succeed."""
_COUNTED = ("prompt", "completion")
_UNREADABLE = (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError)
"""Raised by replies of another shape."""


@dataclass(frozen=True, slots=True)
class ChatReply:
    """ChatReply(text="<search> e9 r2 ")"""

    text: str
    reasoning: str = ""
    """The thought, from servers that return it apart from the text."""
    is_cut: bool = False
    """It reached the limit of tokens."""
    calls: tuple[Mapping[str, Any], ...] = ()
    """The tool calls, from servers that return them apart from the text: objects with "name" and
    "arguments"."""
    num_tokens: tuple[int, int] = (0, 0)
    """Of the request and of the reply, as the server counts them; 0 where it does not."""


class ChatError(Exception):
    """A request without a usable reply; the message names the reason, in words that other requests
    share."""

    def __init__(self, reason: str, status: int | None = None) -> None:
        super().__init__(reason)
        self.status = status
        """Of the refusal; None where the server was not reached, or failed in every attempt."""


class _TransientError(Exception):
    """A request that failed in a way that the next one may not."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class ChatClient:
    """Asks one model of a server. Any number of requests may be under way."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        option: str = "buffer.build.agent",
        api_key: str | None = None,
        timeout_s: float = 120.0,
        max_retries: int = 4,
        backoff_s: float = 1.0,
    ) -> None:
        """Args:
        option: the setting or option that names the address.
        api_key: sent as bearer token; None sends none.
        timeout_s: longest wait for one reply.
        max_retries: further requests after one that failed.
        backoff_s: wait before the first of them; it doubles each time, up to MAX_BACKOFF_S, and a
            keyed part of up to half is taken off. A longer wait that the server asks for is kept.

        Raises SettingError for a url that is no http(s) address.
        """
        self._url = f"{api_root(expanded(url, option), option)}/chat/completions"
        self._model, self._headers = model, _headers(api_key)
        self._timeout_s, self._max_retries, self._backoff_s = timeout_s, max_retries, backoff_s
        self._http: httpx.AsyncClient | None = None

    async def complete(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        temperature: float,
        max_tokens: int,
        seed: int,
        noise_key: tuple[int | str, ...],
        stop: Sequence[str] = (),
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> ChatReply:
        """Returns the reply to a chat.

        Args:
            max_tokens: of the reply, in the server's tokens.
            noise_key: of the waits between requests.
            stop: texts at which the server ends the reply; they are not part of it.
            tools: that the model may call, each as OpenAI's requests describe one.

        Raises:
            ChatError: the server refused, or all requests failed.
        """
        body: dict[str, Any] = {
            "model": self._model,
            "messages": list(messages),
            "temperature": temperature,
            "max_tokens": max_tokens,
            "seed": seed,
        }
        body |= {"stop": list(stop)} if stop else {}
        body |= {"tools": list(tools)} if tools else {}
        attempt = 0
        while True:
            try:
                return await self._request(body)
            except _TransientError as error:
                if attempt == self._max_retries:
                    raise ChatError(str(error)) from error
                # Without the keyed part all requests of a busy server would come back together.
                wait_s = self._backoff_s * 2**attempt * (1.0 - keyed_unit(*noise_key, attempt) / 2)
                await asyncio.sleep(min(max(wait_s, error.wait_s), MAX_BACKOFF_S))
            attempt += 1

    async def _request(self, body: Mapping[str, Any]) -> ChatReply:
        import httpx

        if self._http is None:
            # The wait as a whole is limited below; httpx would limit each read by itself.
            # The number of requests under way is the caller's to limit.
            self._http = httpx.AsyncClient(
                headers=self._headers, timeout=None, limits=httpx.Limits(max_connections=None)
            )
        try:
            async with asyncio.timeout(self._timeout_s):
                # httpx's own JSON cannot hold half a surrogate pair, such as a cut emoji.
                response = await self._http.post(self._url, content=json.dumps(body).encode())
        except TimeoutError as error:
            raise _TransientError(f"no reply within {self._timeout_s:g} s") from error
        except httpx.HTTPError as error:
            # The class alone: with ports and times in them, equal reasons could not be counted.
            raise _TransientError(f"no reply: {type(error).__name__}") from error
        status = response.status_code
        if status in _TRANSIENT or status >= 500:
            raise _TransientError(f"HTTP {status}", _seconds(response.headers.get("retry-after")))
        if status != 200:
            raise ChatError(f"HTTP {status}: {' '.join(response.text[:200].split())}", status)
        try:
            whole = response.json()
            choice = whole["choices"][0]
            message = choice["message"]
            text = message.get("content") or ""
            # Two names are in use; neither is part of OpenAI's protocol.
            reasoning = message.get("reasoning_content") or message.get("reasoning")
            if not isinstance(text, str):  # a list of parts, as for images
                raise TypeError
            calls = tuple(dict(one["function"]) for one in message.get("tool_calls") or ())
            usage = whole.get("usage") or {}
            read, written = (int(usage.get(f"{one}_tokens") or 0) for one in _COUNTED)
        except _UNREADABLE as error:
            raise _TransientError("a reply that is no chat completion") from error
        return ChatReply(
            text=text,
            reasoning=reasoning.strip() if isinstance(reasoning, str) else "",
            is_cut=choice.get("finish_reason") == "length",
            calls=calls,
            num_tokens=(read, written),
        )

    async def close(self) -> None:
        """Closes the connections; a later request opens new ones."""
        if self._http is not None:
            await self._http.aclose()
            self._http = None


def _headers(api_key: str | None) -> dict[str, str]:
    own = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return {"Content-Type": "application/json", **own}


def _seconds(header: str | None) -> float:
    try:
        return max(0.0, float(header or 0.0))
    except ValueError:  # a date, which HTTP allows too
        return 0.0


def served_model(
    url: str,
    api_key: str | None,
    *,
    timeout_s: float = 10.0,
    option: str = "buffer.build.agent",
    model_option: str = "buffer.build.model",
) -> str:
    """Returns the name of the one model that a server has.

    Args:
        option: the setting or option that names the address.
        model_option: the one that names the model.

    Raises:
        ModelError: the server cannot be asked, or has none or several.
    """
    import httpx

    place = f"{api_root(url, option)}/models"
    try:
        response = httpx.get(place, headers=_headers(api_key), timeout=timeout_s)
        response.raise_for_status()
        names = [str(model["id"]) for model in response.json()["data"]]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{option} {url}: the server did not say what it serves ({type(error).__name__});"
            f" expected a list of models at {place}. Start it, correct the address, or name the"
            f" model with {model_option}.",
            code="server-silent",
        ) from error
    if len(names) != 1:
        raise ModelError(
            f"{option} {url} serves {', '.join(names) or 'no model'}; name one of them with"
            f" {model_option}.",
            code="several-models",
        )
    return names[0]


def api_root(url: str, option: str = "buffer.build.agent") -> str:
    """Returns the address below which the routes lie: http://host:8000 gives http://host:8000/v1.

    Args:
        option: the setting or option that names the address.

    Raises:
        SettingError: not a http(s) address.
    """
    try:
        parts = urlsplit(url)
        is_good = (
            parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        )
    except ValueError:
        is_good = False
    if not is_good:
        raise SettingError(
            f"{option} '{redacted(url)}' is not the address of a server; expected one such as"
            " http://127.0.0.1:8000/v1",
            code="address-invalid",
        )
    # Users also paste the address of the route itself.
    path = parts.path.rstrip("/").removesuffix("/chat/completions")
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}"


def api_key_from(variable: str | None) -> str | None:
    """Returns the key in an environment variable, None where no variable is named. Raises
    SettingError where it is not set."""
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise SettingError(
            f"buffer.build.api_key_env {variable}: that environment variable is not set; expected"
            " the server's key in it",
            code="key-unset",
        )
    return key
