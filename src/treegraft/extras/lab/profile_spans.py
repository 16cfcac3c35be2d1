"""Where the seconds of a run's updates went across its processes, by the spans that they have
recorded (`track.spans = "file"`)."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from treegraft import DataError
from treegraft.parts import files

Interval = tuple[float, float]
"""Begin and end in seconds."""
FIRST = "rank 0"


@dataclass(frozen=True, slots=True)
class Part:
    """What one process did in the updates of a run."""

    process: str
    what: str
    times: float
    """An update."""
    seconds: float
    """An update, in which at least one was under way."""
    share: float
    """Of the updates' time, 0..1."""
    at_once: float
    """How many were under way, on average over these seconds."""


@dataclass(frozen=True, slots=True)
class Spent:
    """The result of `spent`."""

    num_updates: int
    update_s: float
    """Mean of an update, evaluations left out."""
    idle: float
    """Share of the rollouts in which no completion was under way, 0..1."""
    parts: tuple[Part, ...]


def spent(folder: Path) -> Spent:
    """Returns where the time of a run's updates went.

    Raises:
        DataError: the folder holds no spans of a whole update, or a file of them is damaged.
    """
    found: dict[tuple[str, str], list[Interval]] = defaultdict(list)
    for path in sorted(folder.glob("spans-*.jsonl")):
        for role, name, interval, is_whole in _spans(path):
            # An update that was stopped is done again, and its time no update's.
            if is_whole or name != "update":
                found[role, name].append(interval)
    whole = found.pop((FIRST, "update"), [])
    updates, num = union(whole), len(whole)
    if not updates:
        raise DataError(
            f"'{folder}': got no spans of an update, expected a run folder with spans-*.jsonl in"
            " it. Record them with: treegraft train RECIPE track.spans=file (cluster likewise).",
            code="no-spans",
        )
    wall_s = length(updates)
    parts = []
    for (role, name), intervals in found.items():
        each_s = [seconds for seconds in lengths_within(intervals, updates) if seconds > 0]
        if not each_s:
            continue
        busy_s = length(common(union(intervals), updates))
        at_once = sum(each_s) / busy_s
        parts.append(Part(role, name, len(each_s) / num, busy_s / num, busy_s / wall_s, at_once))
    rollouts = common(union(found[FIRST, "rollout"]), updates)
    asked = union(one for (_, name), many in found.items() if name == "engine" for one in many)
    idle = 1.0 - length(common(asked, rollouts)) / (length(rollouts) or 1.0)
    parts.sort(key=lambda one: (_place(one.process), -one.seconds))
    return Spent(num, wall_s / num, idle, tuple(parts))


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the same time as intervals that do not touch, in their order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def common(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Returns the time that is in both, each a `union`."""
    found, n, m = [], 0, 0
    while n < len(some) and m < len(others):
        begin, end = max(some[n][0], others[m][0]), min(some[n][1], others[m][1])
        if begin < end:
            found.append((begin, end))
        if some[n][1] < others[m][1]:
            n += 1
        else:
            m += 1
    return found


def lengths_within(some: Iterable[Interval], others: Sequence[Interval]) -> Iterator[float]:
    """Yields the seconds of each of `some` that are in `others`, a `union`."""
    begins, ends = [begin for begin, _ in others], [end for _, end in others]
    for one in some:
        near = others[bisect_right(ends, one[0]) : bisect_left(begins, one[1])]
        yield length(common([one], near))


def length(intervals: Iterable[Interval]) -> float:
    """Returns the seconds of a `union`."""
    return sum(end - begin for begin, end in intervals)


def _spans(path: Path) -> Iterator[tuple[str, str, Interval, bool]]:
    """Yields (role, name, interval, whether nothing has ended it early) of the spans in a file; a
    line that a killed process has left unfinished is left out."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith("\n"):
                return
            try:
                one = json.loads(line)
                role = str(one["resource"]["attributes"]["treegraft.role"])
                interval = _seconds(one["start_time"]), _seconds(one["end_time"])
                is_whole = one.get("status", {}).get("status_code") != "ERROR"
                yield role, str(one["name"]), interval, is_whole
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"'{path}', line {number}: got no span of OpenTelemetry ({error!r}). Remove"
                    " the line.",
                    code="span-invalid",
                ) from error


def _seconds(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()


def _place(role: str) -> tuple[bool, list[Any]]:
    """Ranks first, then the others, each by name and number."""
    name, _, number = role.rpartition(" ")
    return not role.startswith("rank"), [name, int(number) if number.isdigit() else 0]


def table(parts: Iterable[Part]) -> Iterator[str]:
    """Yields the lines of a Markdown table."""
    yield "| process | what | times | seconds | of the update | at once |"
    yield "|---|---|---:|---:|---:|---:|"
    for one in parts:
        numbers = f"{one.times:.1f} | {one.seconds:.3f} | {one.share:.0%} | {one.at_once:.1f}"
        yield f"| {one.process} | {one.what} | {numbers} |"


def print_spent(folder: Path, json_file: Path | None) -> None:
    """Prints where the time of a run's updates went; writes the same as JSON where a file is
    named."""
    found = spent(folder)
    console = Console(soft_wrap=True, markup=False, highlight=False)
    console.print(f"{found.num_updates} updates, {found.update_s:.3f} s each on average")
    for line in table(found.parts):
        console.print(line)
    console.print(f"no completion was under way for {found.idle:.0%} of the rollouts' time")
    if json_file is not None:
        content: Mapping[str, Any] = asdict(found)
        files.write_atomically(json_file, json.dumps(content, indent=1) + "\n")
