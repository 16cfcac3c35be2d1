"""Chat messages in the columns of data sets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")


def are_messages(value: Any) -> bool:
    """Returns whether a value is a list of chat messages, well formed or not."""
    return (
        isinstance(value, (list, tuple))
        and bool(value)
        and all(isinstance(one, Mapping) and "role" in one for one in value)
    )


def read_messages(value: Any) -> tuple[dict[str, Any], ...]:
    """Returns chat messages as a template takes them: contents are texts, arguments of calls
    objects, entries that are None left out.

    Raises:
        ValueError: messages that do not end with a question to the agent, a role that is not known,
            or a part that is not text.
    """
    messages = tuple(map(_message, value))
    if messages[-1]["role"] not in ("user", "tool") or not last_question(messages).strip():
        raise ValueError(
            f"messages that end with the role '{messages[-1]['role']}' and do not ask anything"
        )
    return messages


def last_question(messages: Any) -> str:
    """Returns the content of the last message by the user; empty without one."""
    users = (one for one in reversed(messages) if one.get("role") == "user")
    return next((_text(one.get("content")) for one in users), "")


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    # A parquet file has every field in every message, None where it was not given.
    message = {key: one for key, one in given.items() if one is not None}
    if message.get("role") not in ROLES:
        raise ValueError(f"a message with the role {message.get('role')!r}")
    message["content"] = _text(message.get("content"))
    calls = message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = [_call(call) for call in calls]
    return message


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, (list, tuple)) else []
    texts = [one.get("text") for one in parts if isinstance(one, Mapping)]
    if not parts or len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise ValueError("a message whose content holds something other than text")
    return "".join(map(str, texts))


def _call(given: Any) -> dict[str, Any]:
    function = given.get("function", given) if isinstance(given, Mapping) else {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = None
    if not isinstance(function.get("name"), str) or not isinstance(arguments, Mapping):
        raise ValueError("a tool call without a name and arguments")
    return {
        **{key: one for key, one in given.items() if key == "id" and one is not None},
        "type": "function",
        "function": {"name": function["name"], "arguments": dict(arguments)},
    }
