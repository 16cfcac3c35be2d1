"""Where in its line each step of a tree stands, so that one path of a large tree is read without
parsing the others.

A tree of 64 leaves with 10,000 tokens each is a line of some 30 MB; a path is a sixty-fourth of it.
What is kept of a tree is the place of each step and the leaves, never tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True, slots=True)
class StepIndex:
    """One tree without its steps, and where they are."""

    head: Mapping[str, Any]
    """Everything of the tree but its steps."""
    places: Mapping[str, tuple[int, int]]
    """Step id -> where its object begins and ends in the line, in bytes."""


def parse_indexed(line: bytes) -> tuple[dict[str, Any], StepIndex]:
    """Returns a tree parsed, with the places of its steps.

    Raises:
        ValueError: the line is no JSON object.
    """
    text = line.decode()
    tree: dict[str, Any] = {}
    places: list[tuple[int, int]] = []
    at = _skip(text, _expect(text, _skip(text, 0), "{"))
    while text[at : at + 1] != "}":
        key, at = _DECODER.raw_decode(text, at)
        at = _skip(text, _expect(text, _skip(text, at), ":"))
        if key == "steps" and text[at : at + 1] == "[":
            tree[key], places, at = _array(text, at)
        else:
            tree[key], at = _DECODER.raw_decode(text, at)
        at = _skip(text, at)
        if text[at : at + 1] == ",":
            at = _skip(text, at + 1)
        elif text[at : at + 1] != "}":
            raise ValueError(f"expected ',' or '}}' at character {at}")
    if text[at + 1 :].strip():
        raise ValueError(f"something follows the object at character {at + 1}")
    ids = [str(step.get("id")) if isinstance(step, dict) else "" for step in tree.get("steps", ())]
    head = {key: value for key, value in tree.items() if key != "steps"}
    return tree, StepIndex(
        head, dict(zip(ids, _in_bytes(text, places, is_ascii=len(text) == len(line)), strict=True))
    )


def read_steps(index: StepIndex, ids: Sequence[str], read: Any) -> dict[str, Any]:
    """Returns the tree with these steps alone.

    Args:
        read: (begin, end) in bytes -> that part of the line.
    """
    return {**index.head, "steps": [json.loads(read(*index.places[step_id])) for step_id in ids]}


def _array(text: str, at: int) -> tuple[list[Any], list[tuple[int, int]], int]:
    """The elements of an array with their places, and where it ends."""
    values, places = list[Any](), list[tuple[int, int]]()
    at = _skip(text, at + 1)
    while text[at : at + 1] != "]":
        begin = at
        value, at = _DECODER.raw_decode(text, begin)
        values.append(value)
        places.append((begin, at))
        at = _skip(text, at)
        if text[at : at + 1] == ",":
            at = _skip(text, at + 1)
        elif text[at : at + 1] != "]":
            raise ValueError(f"expected ',' or ']' at character {at}")
    return values, places, at + 1


def _in_bytes(
    text: str, places: Sequence[tuple[int, int]], *, is_ascii: bool
) -> Iterator[tuple[int, int]]:
    """Places in characters, which come in order, as places in bytes."""
    if is_ascii:
        yield from places
        return
    seen, num_bytes = 0, 0
    for begin, end in places:
        num_bytes += len(text[seen:begin].encode())
        first = num_bytes
        num_bytes += len(text[begin:end].encode())
        seen = end
        yield first, num_bytes


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def _expect(text: str, at: int, mark: str) -> int:
    if text[at : at + 1] != mark:
        raise ValueError(f"expected '{mark}' at character {at}")
    return at + 1
