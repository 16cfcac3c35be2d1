"""Columns of a row under the names that files give them, their chat messages, and defects of
rows."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from treegraft.core.errors import nearest

_MISSING = object()
_INDEX = re.compile(r"\[(-?\d+)\]")


def find_value(values: Mapping[str, Any], names: Sequence[str]) -> tuple[str, Any] | None:
    """Returns the first of the named columns that the row has, with its value (None for NaN); None
    where it has none of them.

    Dots go into nested columns and numbers into lists, from the end where they are negative:
    "prompt.-1.content" or "prompt[-1].content". The exact name is preferred to one in another case.
    """
    for name in names:
        value = _entry(values, name)
        # The whole name first: some files have columns such as "reward.style" without nesting.
        if value is _MISSING:
            value = values
            for part in _INDEX.sub(r".\1", name).split("."):
                value = _inner(value, part)
        if value is not _MISSING:
            return name, None if _is_blank(value) else value
    return None


def _is_blank(value: Any) -> bool:
    # Tables that pandas wrote have NaN where a value is missing.
    return value is None or (isinstance(value, float) and math.isnan(value))


def _inner(value: Any, part: str) -> Any:
    if isinstance(value, Mapping):
        return _entry(value, part)
    is_place = isinstance(value, (list, tuple)) and re.fullmatch(r"-?\d{1,9}", part)
    return value[int(part)] if is_place and -len(value) <= int(part) < len(value) else _MISSING


def _entry(values: Mapping[str, Any], name: str) -> Any:
    if name in values:
        return values[name]
    # Spreadsheets and people write "Answer" for "answer".
    for key, value in values.items():
        if key.lower() == name.lower():
            return value
    return _MISSING


def nested_columns(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every column with its value, nested ones by dotted names after their parents."""
    for name, value in values.items():
        yield f"{prefix}{name}", value
        if isinstance(value, Mapping):
            yield from nested_columns(value, f"{prefix}{name}.")


def accepted_answers(value: Any) -> tuple[str, ...]:
    """Returns the texts of a reference, a single one or a list, that are not blank, each once;
    lists and objects in it are not texts."""
    values = value if isinstance(value, (list, tuple)) else [value]
    texts: dict[str, None] = {}
    for one in values:
        if not (_is_blank(one) or is_nested(one)) and (text := str(one).strip()):
            texts[text] = None
    return tuple(texts)


def is_nested(value: Any, *, may_be_list: bool = False) -> bool:
    """Returns whether a value is a list or an object, which has no text; a list of plain values is
    not where `may_be_list`."""
    if may_be_list and isinstance(value, (list, tuple)):
        return any(map(is_nested, value))
    return isinstance(value, (Mapping, list, tuple))


def after_mark(answers: Sequence[str], mark: str | None) -> tuple[str, ...]:
    """Returns the part of each answer after the last `mark`, the whole of one without it."""
    if mark is None:
        return tuple(answers)
    return tuple(text for one in answers if (text := one.rpartition(mark)[2].strip()))


@dataclass(slots=True)
class Defects:
    """Rows with a defect, by kind, kinds in the order in which they first occur."""

    rows: dict[str, list[int]] = field(default_factory=dict)

    def add(self, kind: str, row: int) -> None:
        """Counts a row, once per kind."""
        rows = self.rows.setdefault(kind, [])
        if not rows or rows[-1] != row:
            rows.append(row)

    def sentences(self, kept: str = "") -> list[str]:
        """Returns one sentence per kind, such as "2 rows without a question were left out".

        Args:
            kept: the kind whose rows were used nevertheless.
        """
        sentences: list[str] = []
        for kind, rows in self.rows.items():
            counted = f"{len(rows)} rows {kind} were" if len(rows) > 1 else f"1 row {kind} was"
            sentences.append(f"{counted} {'kept' if kind == kept else 'left out'}")
        return sentences


# ---------------------------------------------------------------------- chat messages

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
    # The agent writes the next message, so the last one must be another's.
    if messages[-1]["role"] not in ("user", "tool") or not last_question(messages).strip():
        raise ValueError(
            f"messages that end with the role '{messages[-1]['role']}' and do not ask anything"
            " (expected nothing after the user's question; a reference has a column of its own)"
        )
    return messages


def check_role(role: Any, known: Sequence[str] = ROLES) -> None:
    """Raises ValueError for a role of a chat message that is not among the known ones."""
    if role not in known:
        hint = nearest(str(role), known).replace(" Did", "; did")
        raise ValueError(f"a message with the role {role!r} (expected {', '.join(known)}{hint})")


def last_question(messages: Any) -> str:
    """Returns the content of the last message by the user; empty without one."""
    for one in reversed(messages):
        if one.get("role") == "user":
            return message_text(one.get("content"))
    return ""


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    # A parquet file has every field in every message, None where it was not given.
    message = {key: one for key, one in given.items() if one is not None}
    check_role(message.get("role"))
    message["content"] = message_text(message.get("content"))
    calls = message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = [_call(call) for call in calls]
    return message


def message_text(content: Any) -> str:
    """Returns the content of a message: a text, or the texts of a list of parts. Raises ValueError
    for anything else."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, (list, tuple)) else []
    texts: list[str] = []
    for one in parts:
        text = one.get("text") if isinstance(one, Mapping) else None
        # Images and sounds have no text, and dropping them would change the question.
        if not isinstance(text, str):
            parts = []
            break
        texts.append(text)
    if not parts:
        raise ValueError("a message whose content holds something other than text")
    return "".join(texts)


def _call(given: Any) -> dict[str, Any]:
    function = given.get("function", given) if isinstance(given, Mapping) else {}
    arguments = function.get("arguments")
    # As OpenAI's interface has them; templates want the object.
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
