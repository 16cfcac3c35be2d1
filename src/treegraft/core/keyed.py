"""Keyed randomness: numbers that are functions of a key, equal on every machine and Python
version."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


def keyed_int(*key: int | str) -> int:
    """Returns 64 evenly spread bits that depend on the key alone."""
    # With the types, so that 1 and "1" differ. Python's own hash changes with the process.
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in key)
    # Questions may hold half a surrogate pair.
    data = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def keyed_choice(items: Sequence[Item], *key: int | str) -> Item:
    """Returns the item that the key selects. Raises ZeroDivisionError where there is none."""
    return items[keyed_int(*key) % len(items)]


def keyed_unit(*key: int | str) -> float:
    """Returns a number from 0 up to, not including, 1 that depends on the key alone."""
    # 53 bits are what a float holds; more could round up to 1.
    return (keyed_int(*key) >> 11) / 2**53
