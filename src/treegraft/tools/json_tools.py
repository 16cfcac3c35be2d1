"""Names of tools as tags need them."""

from __future__ import annotations

import re

_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def tag_of(name: str) -> str:
    """Returns a server's name of a tool in lower-case letters and underscores, as a tag needs it:
    readFile2 gives read_file_two."""
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    # Spelled out, not dropped: two tools may differ by a digit alone.
    spelled = re.sub(r"[0-9]", lambda digit: f"_{_DIGITS[int(digit[0])]}_", parted)
    return re.sub(r"[^a-z]+", "_", spelled.lower()).strip("_") or "tool"
