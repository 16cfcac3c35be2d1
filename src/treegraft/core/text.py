"""What calls came to, as text."""

from __future__ import annotations

from typing import Any


def as_text(result: Any) -> str:
    """Returns a tool's result as text; bytes are read as UTF-8."""
    if isinstance(result, str):
        return result
    if isinstance(result, bytes | bytearray | memoryview):
        return bytes(result).decode("utf-8", errors="replace")
    return str(result)


def describe(error: BaseException | None) -> str:
    """Returns an error's class and message."""
    try:
        message = str(error)
    except Exception:
        message = ""
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
