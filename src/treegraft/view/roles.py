"""The actors of a run on a cluster, in a line."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from treegraft.runs.roles import read_roles


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
