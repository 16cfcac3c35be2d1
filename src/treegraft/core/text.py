"""Tool results, errors and foreign text as harmless text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any, Final

TAGS: Final = r"</?[a-z_]+>|\\boxed\{|\}"
"""The pattern of markup that stands beside a word without a blank."""


def as_text(result: Any) -> str:
    """Returns a tool's result as text: nothing for None, bytes read as UTF-8, JSON of mappings,
    lists, arrays and records."""
    # First: most tools return text.
    if isinstance(result, str):
        return result
    if result is None:
        return ""
    # Pydantic takes a third of the time of `treegraft --help`.
    from pydantic import BaseModel
    from pydantic_core import to_jsonable_python

    result = _readable(result)
    is_record = is_dataclass(result) and not isinstance(result, type)
    # The text of a long array leaves numbers out.
    is_array = type(result).__name__ in ("ndarray", "Tensor")
    if is_record or is_array or isinstance(result, Mapping | list | tuple | BaseModel):
        return json.dumps(to_jsonable_python(result, fallback=_bare), ensure_ascii=False)
    return str(result)


def _readable(value: Any) -> Any:
    """`value` with text in place of bytes, and lists in place of sets, in the order of their
    members' JSON: a set's own order differs from process to process."""
    from pydantic_core import to_json

    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode("utf-8", errors="replace")
    if isinstance(value, set | frozenset):
        return sorted(map(_readable, value), key=lambda one: to_json(one, fallback=_bare))
    if isinstance(value, list | tuple):
        return list(map(_readable, value))
    if isinstance(value, Mapping):
        return {name: _readable(one) for name, one in value.items()}
    return value


def _bare(value: Any) -> Any:
    """Numbers and arrays of NumPy and torch as Python's own; anything else as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def describe(error: BaseException | None) -> str:
    """Returns an error's class and message."""
    try:
        message = str(error)
    except Exception:  # classes of users may fail at this too
        message = ""
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


_VISIBLE = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
_VISIBLE |= {127: "\u2421"} | dict.fromkeys(
    [*range(128, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000)],
    "\ufffd",
)
"""Control characters, C1 codes, direction overrides and half surrogate pairs -> a visible
stand-in."""


def plain(text: str, limit: int | None = None) -> str:
    """Returns foreign text with control characters made visible, cut to `limit` characters."""
    clean = text.translate(_VISIBLE)
    if limit is not None and len(clean) > limit:
        return f"{clean[:limit]} … ({len(clean) - limit} more characters)"
    return clean
