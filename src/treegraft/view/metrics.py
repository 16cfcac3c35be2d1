"""The metrics of a run: read as the file grows, and thinned to what a page can hold."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from treegraft.core.files import parse_json
from treegraft.runs.metrics import CALLS

MAX_COUNT = 10**12
"""Whole numbers beyond it, which no run has, are taken for damage."""
MAX_LINES = 1000
"""Lines of one answer; of more lines, every so-and-so-many-th is sent."""
AXES = {"tokens": ("rollout/num_sampled_tokens",), "calls": CALLS}
"""Metrics whose sums so far may be the x axis of a chart, if the first of them was recorded;
seconds by the clock are made of others."""


class MetricsTable:
    """The whole lines of a metrics.jsonl. Every method may be called from any thread."""

    def __init__(self) -> None:
        self.num_damaged = 0
        """Lines that were left out."""
        self._lock = threading.Lock()
        self._lines: list[dict[str, float]] = []
        self._names: dict[str, None] = {}
        self._read_to = 0

    @property
    def num_lines(self) -> int:
        return len(self._lines)

    def refresh(self, path: Path) -> None:
        """Reads what is new."""
        with self._lock:
            size = path.stat().st_size if path.exists() else 0
            # A resume cuts the file to its checkpoint, and repeated lines follow.
            if size < self._read_to:
                self._lines = []
                self._names = {}
                self._read_to = 0
                self.num_damaged = 0
            if size == self._read_to:
                return
            with path.open("rb") as file:
                file.seek(self._read_to)
                data = file.read()
            # A line that is being written is left for the next time.
            whole = data[: data.rfind(b"\n") + 1]
            self._read_to += len(whole)
            for raw in whole.splitlines():
                self._add(raw)

    def _add(self, raw: bytes) -> None:
        """Adds a line; one without the number of its update is damaged, and left out."""
        line: Any = None
        with suppress(ValueError):
            line = parse_json(raw)
        update = line.get("update") if isinstance(line, dict) else None
        if not isinstance(update, int | float) or not 0 <= update <= MAX_COUNT:
            self.num_damaged += 1
            return
        found = {}
        for key, value in line.items():
            if isinstance(value, int | float):
                # No float is a whole number above 1e308.
                is_huge = isinstance(value, int) and abs(value) > 1e308
                # One object for a name that every line has: most of a long run's memory is names.
                found[sys.intern(key)] = math.inf if is_huge else float(value)
        self._lines.append(found)
        self._names |= dict.fromkeys(found)

    def last_update(self) -> int:
        """Returns the update of the last line; 0 without one."""
        return int(self._lines[-1]["update"]) if self._lines else 0

    def axes(self, numbers: Sequence[int]) -> dict[str, list[float]]:
        """Returns for each axis that was recorded the sum up to and with each of these lines:
        sampled tokens, executed tool calls, and seconds by the clock (wall_s)."""
        names = self.names()
        sums: dict[str, np.ndarray] = {}
        for axis, keys in AXES.items():
            if keys[0] in names:
                sums[axis] = sum(map(self._column, keys), np.zeros(1))
        if {"time/update_s", "time/eval_s"} & {*names}:
            update = self._column("time/update_s")
            # The seconds of an update hold those of its evaluation; line 0 has no update.
            sums["wall_s"] = np.where(update > 0, update, self._column("time/eval_s"))
            sums["wall_s"] += self._column("time/warmup_s")
        wanted = np.asarray(numbers, np.int64)
        return {axis: np.cumsum(values)[wanted].tolist() for axis, values in sums.items()}

    def _column(self, key: str) -> np.ndarray:
        # Lines without a usable value add nothing to a sum.
        values = [line.get(key, 0.0) for line in self._lines]
        return np.asarray(np.nan_to_num(values, posinf=0.0, neginf=0.0))

    def last(self, keys: Sequence[str]) -> dict[str, float]:
        """Returns the last finite value of each of these metrics that has one."""
        found: dict[str, float] = {}
        for line in self._lines:
            for key in keys:
                if key in line and math.isfinite(line[key]):
                    # Later lines win: evaluations are in some lines only.
                    found[key] = line[key]
        return found

    def names(self) -> list[str]:
        """Returns the metrics that occur."""
        return list(self._names)

    def chosen(self) -> tuple[Sequence[int], int]:
        """Returns the numbers of the lines that a page gets, and the stride between them: 1 for
        all.

        Beyond MAX_LINES these are every stride-th, the last, and at most as many of those with an
        evaluation or a warning.
        """
        total = self.num_lines
        stride = math.ceil(total / MAX_LINES)
        if stride <= 1:
            return range(total), 1
        rare = []
        for number, line in enumerate(self._lines[:total]):
            if any(key.startswith(("eval/", "health/")) for key in line):
                rare.append(number)
        rare = rare[:: math.ceil(len(rare) / MAX_LINES) or 1]
        return sorted({*range(0, total - 1, stride), *rare, total - 1}), stride

    def lines(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Returns these lines, in ascending order."""
        found: list[dict[str, Any]] = []
        for number in numbers:
            line = self._lines[number]
            found.append(line | {"update": int(line["update"])})
        return found


def clean_lines(raw: Sequence[Mapping[str, float]]) -> tuple[list[dict[str, float]], list[str]]:
    """Returns one line of finite numbers an update, in order, and a note on values that were left
    out."""
    by_update: dict[float, dict[str, float]] = {}
    unusable: list[str] = []
    for line in raw:
        numbers = {}
        for key, value in line.items():
            if math.isfinite(value):
                numbers[key] = float(value)
            else:
                unusable.append(f"{key} of update {line['update']} is {value}")
        # Of two lines of one update the later one: a resume repeats updates, and goes on from it.
        by_update[line["update"]] = numbers
    notes: list[str] = []
    if unusable:
        more = f", and {len(unusable) - 3} more" if len(unusable) > 3 else ""
        notes.append(f"left out: {'; '.join(unusable[:3])}{more}")
    return [by_update[update] for update in sorted(by_update)], notes
