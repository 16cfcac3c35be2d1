"""What is installed: the packages that the core requires, and all that these require."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]


def same(name: str) -> str:
    """Returns a distribution's name as all its spellings have it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(requirements: Iterable[str]) -> set[str]:
    """Returns the names of the distributions that requirements bring here, those of those
    included."""
    found: set[str] = set()
    asked = [(Requirement(one), frozenset[str]()) for one in requirements]
    done = set()
    while asked:
        requirement, extras = asked.pop()
        marker = requirement.marker
        if marker and not any(marker.evaluate({"extra": one}) for one in extras | {""}):
            continue
        name, wanted = same(requirement.name), frozenset(requirement.extras)
        if (name, wanted) in done:
            continue
        done.add((name, wanted))
        found.add(name)
        asked += [(Requirement(one), wanted) for one in metadata.requires(name) or ()]
    return found


def required() -> set[str]:
    """Returns the names of all distributions that the core alone brings."""
    return closure(PROJECT["dependencies"])
