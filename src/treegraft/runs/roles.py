"""The actors of a run on a cluster, as its folder shows them while it lasts."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

from treegraft.core.files import parse_json, read_inside
from treegraft.core.text import plain
from treegraft.runs.tree_json import DAMAGE

STALE_S = 30.0
"""Age in seconds from which on the file says nothing of the present."""


def roles_line(path: Path, now: float | None = None) -> str:
    """Returns "2 x engine; engine 1 is down; waiting for engine (12)" for a roles.json; "" if there
    is none of the present, or a damaged one.

    Args:
        now: seconds since 1970; None for the present.
    """
    counts: Counter[str] = Counter()
    waits: Counter[str] = Counter()
    away = []
    try:
        found = parse_json(read_inside(path, path.parent))
        if (time.time() if now is None else now) - float(found["written"]) > STALE_S:
            return ""
        for one in found["roles"]:
            name = plain(str(one["role"]), 20)
            counts[name] += 1
            if one["state"] != "live":
                away.append(f"{name} {int(one['number'])} is {plain(str(one['state']), 20)}")
            for owner, number in one["waits"].items():
                waits[plain(str(owner), 40)] += int(number)
    except (OSError, *DAMAGE):
        return ""
    waiting = [f"{owner} ({number})" for owner, number in sorted(waits.items())]
    parts = [
        ", ".join(f"{number} x {name}" for name, number in counts.items()),
        ", ".join(away),
        f"waiting for {', '.join(waiting)}" if waiting else "",
    ]
    return "; ".join(filter(None, parts))
