"""The actors of a run on a cluster, in a line."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

from treegraft.core.files import parse_json
from treegraft.core.text import plain
from treegraft.runs.tree_json import DAMAGE

STALE_S = 30.0
"""Age in seconds from which on the file says nothing of the present."""


def roles_line(path: Path, now: float | None = None) -> str:
    """Returns "2 x engine, 1 x grower; engine 1 is down; waiting for engine (12)" for a roles.json;
    "" where there is none of the present, or a damaged one.

    Args:
        now: seconds since 1970; None for the present.
    """
    try:
        found = parse_json(path.read_bytes())
        if (time.time() if now is None else now) - float(found["written"]) > STALE_S:
            return ""
        roles, waits = Counter[str](), Counter[str]()
        away = []
        for one in found["roles"]:
            roles[plain(str(one["role"]), 20)] += 1
            if one["state"] != "live":
                state = plain(str(one["state"]), 20)
                away.append(f"{plain(str(one['role']), 20)} {int(one['number'])} is {state}")
            for owner, num in one["waits"].items():
                waits[plain(str(owner), 40)] += int(num)
    except (OSError, *DAMAGE):
        return ""
    standing = [f"{num} x {role}" for role, num in roles.items()]
    waiting = [f"{owner} ({num})" for owner, num in sorted(waits.items())]
    parts = [", ".join(standing), ", ".join(away)]
    parts.append(f"waiting for {', '.join(waiting)}" if waiting else "")
    return "; ".join(filter(None, parts))
