"""The tables that a report begins with: the results and costs of each group, and the settings in
which they differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from treegraft.extras.lab.report.bars import final_bar
from treegraft.extras.lab.report.figure import Cell, Table
from treegraft.extras.lab.report.groups import Group, differing, show
from treegraft.extras.lab.report.records import SAMPLED, MetricsLine, Record

GREEDY = "eval/accuracy"
_COSTS = (
    ("tool calls", "rollout/num_tool_calls"),
    ("sampled tokens", "rollout/num_sampled_tokens"),
    ("processor s", "time/cpu_s"),
)


def _wall_s(line: MetricsLine) -> float:
    # The seconds of an update hold those of its evaluation; the first line has no update.
    own = line.get("time/update_s", line.get("time/eval_s", 0.0))
    return own + line.get("time/warmup_s", 0.0)


def _recorded(key: str, line: MetricsLine) -> float | None:
    return line.get(key)


def _mean(records: Sequence[Record], cost: Callable[[MetricsLine], float | None]) -> float | None:
    """The mean over runs of a cost summed over their lines; None where none recorded it."""
    found = [[cost(line) for line in record.lines] for record in records]
    sums = [sum(value or 0.0 for value in one) for one in found if {*one} - {None}]
    return fmean(sums) if sums else None


def _accuracy(group: Group, key: str) -> str | None:
    bar = final_bar(group, key)
    if bar is None:
        return None
    shown = f"{100 * bar.value:.1f} %"
    if bar.low is None or bar.high is None:
        return shown
    return f"{shown} [{100 * bar.low:.1f}, {100 * bar.high:.1f}]"


def summary(groups: Sequence[Group]) -> Table:
    """Returns one row for each group: its last held-out accuracies with their 95 % intervals, and
    the mean costs of its runs."""
    rows = []
    for group in groups:
        records = group.records
        ends = sorted({int(record.lines[-1]["update"]) for record in records if record.lines})
        seconds = _mean(records, lambda line: _wall_s(line) or None)
        rows.append(
            (
                group.panel,
                group.label,
                show(records[0].settings.get("explore.explorers", "")),
                len(records),
                f"{ends[0]} to {ends[-1]}" if len(ends) > 1 else ends[0] if ends else None,
                _accuracy(group, GREEDY),
                _accuracy(group, SAMPLED),
                *(_mean(records, partial(_recorded, key)) for _, key in _COSTS),
                None if seconds is None else duration(seconds),
            )
        )
    columns = ("panel", "group", "explorers", "runs", "updates", "greedy", "sampled")
    return Table((*columns, *(name for name, _ in _COSTS), "time"), rows)


def duration(seconds: float) -> str:
    """Returns seconds in the unit that they fill: "45 s", "12.5 min", "3.25 h"."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def differences(groups: Sequence[Group]) -> Table:
    """Returns one row for each setting that is not the same in all runs, one column for each
    group."""
    names = differing([record.settings for group in groups for record in group.records])
    rows: list[tuple[Cell, ...]] = []
    for name in names:
        values = [_values(group, name) for group in groups]
        rows.append((name, *values))
    return Table(("setting", *(group.title for group in groups)), rows)


def _values(group: Group, name: str) -> str:
    found: dict[str, Any] = {}
    for record in group.records:
        found[show(record.settings[name]) if name in record.settings else "-"] = None
    return "; ".join(found)
