"""robots.txt as RFC 9309 has it: which addresses a site asks a program to leave alone.

Python's own parser knows no wildcards and takes the first rule that fits instead of the longest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import quote, unquote_to_bytes, urlsplit

MAX_BYTES = 500 * 1024
"""Of a robots.txt, as much as must be read; the rest is passed over."""
_MAX_RULES = 5_000


@dataclass(frozen=True, slots=True)
class Robots:
    """Robots(rules=((False, "/private/"), (True, "/private/open")))"""

    rules: tuple[tuple[bool, str], ...] = field(default=())
    """Whether a pattern allows or forbids, and the pattern, for our own program."""

    @classmethod
    def parse(cls, text: str, agent: str) -> Robots:
        """Returns the rules for a program: those of the groups that name it, or else of the groups
        for all.

        Args:
            agent: the program's name, compared without regard to case.
        """
        own: list[tuple[bool, str]] = []
        general: list[tuple[bool, str]] = []
        is_named = False
        for names, rules in _groups(text):
            if agent.lower() in names:
                is_named = True
                own += rules
            elif "*" in names:
                general += rules
        return cls(tuple((own if is_named else general)[:_MAX_RULES]))

    def allows(self, url: str) -> bool:
        """Returns whether the address may be fetched: the longest rule that fits decides, at equal
        length the one that allows."""
        parts = urlsplit(url)
        path = _normal(parts.path or "/") + (f"?{_normal(parts.query)}" if parts.query else "")
        if path == "/robots.txt":
            return True
        fitting = [
            (len(pattern), is_allowed) for is_allowed, pattern in self.rules if _fits(pattern, path)
        ]
        return max(fitting)[1] if fitting else True


def _groups(text: str) -> Iterator[tuple[set[str], list[tuple[bool, str]]]]:
    names: set[str] = set()
    rules: list[tuple[bool, str]] = []
    is_in_rules = False
    for line in text.removeprefix("\ufeff").splitlines():
        key, colon, value = line.partition("#")[0].partition(":")
        key, value = key.strip().lower(), value.strip()
        if not colon:
            continue
        if key == "user-agent":
            if is_in_rules:
                yield names, rules
                names, rules, is_in_rules = set(), [], False
            # "Name/1.0" is what some sites write.
            found = re.match(r"\*|[\w-]+", value)
            names.add(found[0].lower() if found else value.lower())
        elif key in ("allow", "disallow"):
            is_in_rules = True
            if value:
                rules.append((key == "allow", _normal(value)))
    yield names, rules


def _normal(path: str) -> str:
    """Returns the path with everything but plain characters as %XX, so that equal paths are equal
    texts."""
    return quote(unquote_to_bytes(path), safe="/*$?&=:@!',;+~()-._")


def _fits(pattern: str, path: str) -> bool:
    """Returns whether the pattern matches from the path's beginning: "*" is any text, "$" the end.
    Takes linear time."""
    is_whole = pattern.endswith("$")
    first, *rest = pattern.removesuffix("$").split("*")
    if not path.startswith(first):
        return False
    place = len(first)
    if not rest:
        return not is_whole or place == len(path)
    *middle, last = rest
    for part in middle:
        found = path.find(part, place)
        if found < 0:
            return False
        place = found + len(part)
    if is_whole:
        return len(path) - len(last) >= place and path.endswith(last)
    return path.find(last, place) >= 0
