"""Numbers and names in sentences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

MAX_SHOWN = 200
"""Characters of a value that a message repeats."""


def shown(value: Any) -> str:
    """Returns a value as Python writes it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}… ({len(text):,} characters)"


def ranges(numbers: Sequence[int]) -> str:
    """Returns ascending numbers in words: [0, 1, 2, 5] -> "0 to 2, 5"."""
    parts: list[list[int]] = []
    for one in numbers:
        if parts and parts[-1][-1] == one - 1:
            parts[-1].append(one)
        else:
            parts.append([one])
    return ", ".join(f"{p[0]} to {p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def counted(number: int, noun: str) -> str:
    """Returns a number of things: "1 pair", "1,200 pairs"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def quoted(names: Iterable[str]) -> str:
    """Returns names that may hold commas as a list: "'a', 'b, c'"."""
    return ", ".join(f"'{name}'" for name in names)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table in Markdown."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
