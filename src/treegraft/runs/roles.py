"""The actors of a run on a cluster, as its folder shows them while it lasts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from treegraft.core.files import parse_json, read_inside
from treegraft.core.text import plain
from treegraft.runs.tree_json import DAMAGE

STALE_S = 30.0
"""Age in seconds from which on the file says nothing of the present."""


@dataclass(frozen=True, slots=True)
class Role:
    """One actor at the last look at it."""

    name: str
    """What it does: "engine", or what runs of 0.7 had beside those."""
    number: int
    host: str
    state: str
    """"live", or why not."""
    num_starts: int
    num_trees: int | None
    """Trees that grow there; None for an actor of 0.7 that grew none."""
    waits: Mapping[str, int]
    """What it waits for, and how often at once."""
    version: int | None
    """The policy version that an engine holds; None for another actor, or without one."""
    cpu_s: float | None
    memory_bytes: int | None
    """Resident memory; None before the first look, or where the system does not tell."""


def read_roles(path: Path, now: float | None = None) -> list[Role]:
    """Returns the actors of a roles.json; none where there is no such file, or a damaged one, or
    one that is older than STALE_S.

    Args:
        now: seconds since 1970; None for the present.
    """
    try:
        found = parse_json(read_inside(path, path.parent))
        if (time.time() if now is None else now) - float(found["written"]) > STALE_S:
            return []
        return [
            Role(
                name=plain(str(one["role"]), 20),
                number=int(one["number"]),
                host=plain(str(one.get("host", "")), 80),
                state=plain(str(one["state"]), 20),
                num_starts=int(one.get("starts", 0)),
                num_trees=_int(one.get("queue")),
                waits={plain(str(owner), 40): int(num) for owner, num in one["waits"].items()},
                version=_int(one.get("version")),
                cpu_s=None if one.get("cpu_s") is None else float(one["cpu_s"]),
                memory_bytes=_int(one.get("memory_bytes")),
            )
            for one in found["roles"]
        ]
    except (OSError, *DAMAGE):
        return []


def roles_line(path: Path, now: float | None = None) -> str:
    """Returns "2 x engine, 1 x grower; engine 1 is down; waiting for engine (12)" for a roles.json;
    "" where there is none of the present, or a damaged one.

    Args:
        now: seconds since 1970; None for the present.
    """
    roles = read_roles(path, now)
    counts = Counter(one.name for one in roles)
    waits = sum((Counter(one.waits) for one in roles), Counter[str]())
    standing = [f"{num} x {name}" for name, num in counts.items()]
    away = [f"{one.name} {one.number} is {one.state}" for one in roles if one.state != "live"]
    waiting = [f"{owner} ({num})" for owner, num in sorted(waits.items())]
    parts = [", ".join(standing), ", ".join(away)]
    parts.append(f"waiting for {', '.join(waiting)}" if waiting else "")
    return "; ".join(filter(None, parts))


def _int(value: object) -> int | None:
    return None if value is None else int(str(value))
