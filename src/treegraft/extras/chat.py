"""Requests to a server of OpenAI's chat completions, by the client of the package openai."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from treegraft import SettingError
from treegraft.parts import addresses, errors, packages

LONGEST_PAUSE_S = 120.0
"""Limit of the client on a pause between two requests, which a server may ask for."""
LISTING_TIMEOUT_S = 10.0
"""Deadline for the list of a server's models, also if its replies take minutes."""
NO_KEY = "none"
"""Sent to servers without keys, since the client insists on one."""
_OTHER_SHAPE = (ValueError, TypeError, AttributeError, IndexError, RecursionError)
"""Raised by replies that are no chat completion."""


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
    """Of the request and of the reply, as the server counts them; 0 if it does not."""


class ChatError(Exception):
    """A request without a usable reply; the message names the reason, in words that other requests
    share."""

    def __init__(self, reason: str, status: int | None = None) -> None:
        super().__init__(reason)
        self.status = status
        """The HTTP status of the last refusal; None without one."""


class ChatClient:
    """One model of a server. Any number of requests may be under way."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        option: str,
        api_key: str | None = None,
        timeout_s: float = 120.0,
        max_retries: int = 4,
    ) -> None:
        """Args:
        option: the setting or option that names the address, for errors.
        timeout_s: longest wait for one reply.
        max_retries: further requests after one that failed.

        Raises SettingError for a url that is no http(s) address, or without the package openai.
        """
        root = api_root(url, option)
        packages.require(option, "openai")
        from openai import AsyncOpenAI

        self._model = model
        self._key = api_key
        self._timeout_s = timeout_s
        self._client = AsyncOpenAI(
            base_url=root, api_key=api_key or NO_KEY, timeout=timeout_s, max_retries=max_retries
        )
        # The client's own limit is one on each read: a server that sends byte by byte never exceeds
        # it.
        self._deadline_s = (timeout_s + LONGEST_PAUSE_S) * (max_retries + 1)

    async def complete(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        temperature: float,
        max_tokens: int,
        seed: int,
        stop: Sequence[str] = (),
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> ChatReply:
        """Returns the reply to a chat.

        Args:
            max_tokens: of the reply, in the server's tokens.
            stop: texts at which the server ends the reply; they are not part of it.
            tools: that the model may call, each as OpenAI's requests describe one.

        Raises:
            ChatError: the server refused, or all requests failed.
        """
        import openai

        # Some servers refuse empty lists.
        lists: dict[str, Any] = {}
        if stop:
            lists["stop"] = list(stop)
        if tools:
            lists["tools"] = list(tools)
        try:
            async with asyncio.timeout(self._deadline_s):
                found = await self._client.chat.completions.create(
                    model=self._model,
                    messages=_encodable(messages),
                    temperature=temperature,
                    # Not max_completion_tokens, which many compatible servers do not know.
                    max_tokens=max_tokens,
                    seed=seed,
                    **lists,
                )
            return _reply_of(found)
        except (TimeoutError, openai.APITimeoutError) as error:
            raise ChatError(f"no reply within {self._timeout_s:g} s") from error
        except openai.APIConnectionError as error:
            # The class alone: with ports and times in them, equal reasons could not be counted.
            raise ChatError(f"no reply: {type(error.__cause__ or error).__name__}") from error
        except openai.APIStatusError as error:
            status = error.status_code
            body = " ".join(error.response.text[:200].split())
            if self._key:
                body = body.replace(self._key, addresses.HIDDEN)
            raise ChatError(f"HTTP {status}: {body}".rstrip(": "), status) from error
        except (openai.APIError, *_OTHER_SHAPE) as error:
            raise ChatError("a reply that is no chat completion") from error

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.close()


def _encodable(messages: Sequence[Mapping[str, Any]]) -> Any:
    # Half a surrogate pair, such as a cut emoji, has no UTF-8; the client would raise.
    return json.loads(json.dumps(list(messages), ensure_ascii=False).encode(errors="replace"))


def _reply_of(found: Any) -> ChatReply:
    """Raises one of _OTHER_SHAPE: the client checks no reply."""
    choice = found.choices[0]
    message = choice.message
    text = message.content or ""
    if not isinstance(text, str):  # a list of parts, as for images
        raise TypeError
    # Two names are in use; neither is part of OpenAI's protocol.
    reasoning = getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None)
    functions = [call.function for call in message.tool_calls or ()]
    calls = [{"name": one.name, "arguments": one.arguments} for one in functions]
    usage = found.usage
    return ChatReply(
        text=text,
        reasoning=reasoning.strip() if isinstance(reasoning, str) else "",
        is_cut=choice.finish_reason == "length",
        calls=tuple(calls),
        num_tokens=(usage.prompt_tokens or 0, usage.completion_tokens or 0) if usage else (0, 0),
    )


def served_model(url: str, api_key: str | None, *, option: str, model_option: str) -> str:
    """Returns the name of the one model that a server has.

    Args:
        option: the setting or option that names the address.
        model_option: the one that names the model.

    Raises:
        SettingError: no http(s) address, or the package openai is missing.
        ModelError: the server does not answer, or has none or several.
    """
    root = api_root(url, option)
    packages.require(option, "openai")
    import openai

    shown = addresses.redacted(url)
    client = openai.OpenAI(
        base_url=root, api_key=api_key or NO_KEY, timeout=LISTING_TIMEOUT_S, max_retries=0
    )
    try:
        names = [str(model.id) for model in client.models.list().data]
    except (openai.OpenAIError, *_OTHER_SHAPE) as error:
        raise errors.ModelError(
            f"{option} {shown}: the server did not say what it serves ({type(error).__name__});"
            f" expected a list of models at {addresses.redacted(root)}/models. Start it, correct"
            f" the address, or name the model with {model_option}.",
            code="server-silent",
        ) from error
    finally:
        client.close()
    if len(names) != 1:
        raise errors.ModelError(
            f"{option} {shown} serves {', '.join(names) or 'no model'}; name one of them with"
            f" {model_option}.",
            code="several-models",
        )
    return names[0]


def api_root(url: str, option: str) -> str:
    """Returns the address below which the routes lie: http://host:8000 gives http://host:8000/v1.

    Environment variables in it, as ${NAME}, are filled in.

    Raises:
        SettingError: not a http(s) address, or a variable that is not set.
    """
    try:
        parts = urlsplit(addresses.expanded(url, option))
        is_good = (
            parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        )
    except ValueError:
        is_good = False
    if not is_good:
        raise SettingError(
            f"{option} '{addresses.redacted(url)}' is not the address of a server; expected one"
            " such as http://127.0.0.1:8000/v1",
            code="address-invalid",
        )
    # Users also paste the address of the route itself.
    path = parts.path.rstrip("/").removesuffix("/chat/completions")
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}"
