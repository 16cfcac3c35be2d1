"""Output of code as text: printed text, the value of the last expression, limits; also imported
inside the sandbox."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

NO_OUTPUT = "(no output)"
"""The result of code that printed nothing and ended in no value."""
MAX_OUTPUT_CHARS = 100_000
"""Longest printed text and value of one call, each, in characters; the rest is cut with a note."""


class Printed:
    """Collects printed text up to a cap, and how much there was."""

    def __init__(self, max_chars: int) -> None:
        self._max_chars = max_chars
        self._parts: list[str] = []
        self._num_kept = 0
        self._num_chars = 0

    def add(self, text: str) -> None:
        """Keeps as much of `text` as there is room for."""
        # Only so much is stored: code can print more than fits into memory.
        kept = text[: self._max_chars - self._num_kept]
        if kept:
            self._parts.append(kept)
        self._num_kept += len(kept)
        self._num_chars += len(text)

    def text(self) -> str:
        """Returns the collected text, ending in a line break unless empty."""
        text = "".join(self._parts)
        if self._num_chars > self._num_kept:
            text += f"\n[cut after {self._num_kept} of {self._num_chars} printed characters]"
        return text if not text or text.endswith("\n") else text + "\n"


def cut(text: str, max_chars: int) -> str:
    """Returns the first `max_chars` characters, with a note where there were more."""
    return (
        text
        if len(text) <= max_chars
        else f"{text[:max_chars]}\n[cut after {max_chars} of {len(text)} characters]"
    )


def show(value: Any, max_chars: int) -> str:
    """Returns the value's repr, cut at `max_chars`; sets in sorted order, which hash seeds would
    shuffle."""
    # In pieces, so that a huge value needs no memory beyond the cap.
    parts: list[str] = []
    num_chars = 0
    for part in _pieces(value):
        parts.append(part)
        num_chars += len(part)
        if num_chars > max_chars:
            return "".join(parts)[:max_chars] + f"\n[cut after {max_chars} characters]"
    return "".join(parts)


def too_long(max_duration_s: float) -> str:
    """Returns the error of code that ran too long; its output so far is a matter of luck and not
    shown."""
    return f"TimeoutError: the code was stopped; it ran longer than {max_duration_s:g} s"


def too_large(max_memory_mb: int) -> str:
    """Returns the error of code that needed too much memory."""
    return f"MemoryError: the code was stopped; it needed more than {max_memory_mb} MB"


def _pieces(value: Any) -> Iterator[str]:
    kind = type(value)  # not isinstance: a subclass may have a repr of its own
    if kind in (list, tuple):
        yield "[" if kind is list else "("
        for position, entry in enumerate(value):
            yield ", " if position else ""
            yield from _pieces(entry)
        yield "]" if kind is list else ",)" if len(value) == 1 else ")"
    elif kind is dict:
        yield "{"
        for position, (key, entry) in enumerate(value.items()):
            yield ", " if position else ""
            yield from _pieces(key)
            yield ": "
            yield from _pieces(entry)
        yield "}"
    elif kind in (set, frozenset) and value:
        shown = "{" + ", ".join(sorted("".join(_pieces(entry)) for entry in value)) + "}"
        yield shown if kind is set else f"frozenset({shown})"
    else:
        yield repr(value)
