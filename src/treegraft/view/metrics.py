"""The metrics of a run in columns: read as the file grows, and thinned to what a page can hold."""

from __future__ import annotations

import math
import threading
from array import array
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
_CHUNK = 1_000_000
"""Bytes that are read at once."""


class MetricsTable:
    """The whole lines of a metrics.jsonl. Every method may be called from any thread."""

    def __init__(self) -> None:
        self.era = 0
        """Grows when the file was cut or replaced (a resume), so that earlier lines no longer
        hold."""
        self.num_lines = 0
        self.num_damaged = 0
        """Lines that were left out."""
        self._lock = threading.Lock()
        # A metric's lines and its values there: most are missing in most lines of evaluations.
        self._columns: dict[str, tuple[array[int], array[float]]] = {}
        self._read_to = 0

    def refresh(self, path: Path) -> None:
        """Reads what is new."""
        with self._lock:
            size = path.stat().st_size if path.exists() else 0
            if size < self._read_to:
                self._columns = {}
                self._read_to = 0
                self.num_lines = 0
                self.num_damaged = 0
                self.era += 1
            while self._read_to < size and self._read_chunk(path):
                pass

    def _read_chunk(self, path: Path) -> bool:
        """Reads some whole lines; returns whether there were any."""
        with path.open("rb") as file:
            file.seek(self._read_to)
            data = file.read(_CHUNK)
            # A line longer than a chunk is read to its end.
            data += b"" if b"\n" in data else file.readline()
        # A line that is being written is left for the next time.
        whole = data[: data.rfind(b"\n") + 1]
        self._read_to += len(whole)
        for raw in whole.splitlines():
            self._add(raw)
        return bool(whole)

    def _add(self, raw: bytes) -> None:
        """Adds a line; one without the number of its update is damaged, and left out."""
        line: Any = None
        with suppress(ValueError):
            line = parse_json(raw)
        update = line.get("update") if isinstance(line, dict) else None
        if not isinstance(update, int | float) or not 0 <= update <= MAX_COUNT:
            self.num_damaged += 1
            return
        for key, value in line.items():
            if isinstance(value, int | float):
                if (column := self._columns.get(key)) is None:
                    column = self._columns[key] = (array("i"), array("d"))
                column[0].append(self.num_lines)
                # No float is a whole number above 1e308.
                column[1].append(
                    math.inf if isinstance(value, int) and abs(value) > 1e308 else value
                )
        self.num_lines += 1

    def last_update(self) -> int:
        """Returns the update of the last line; 0 without one."""
        with self._lock:
            return int(self._columns["update"][1][-1]) if self.num_lines else 0

    def axes(self, numbers: Sequence[int]) -> dict[str, list[float]]:
        """Returns for each axis that was recorded the sum up to and with each of these lines:
        sampled tokens, executed tool calls, and seconds by the clock (wall_s)."""
        with self._lock:
            sums: dict[str, np.ndarray] = {
                axis: sum(map(self._dense, keys), np.zeros(self.num_lines))
                for axis, keys in AXES.items()
                if keys[0] in self._columns
            }
            if {"time/update_s", "time/eval_s"} & self._columns.keys():
                update = self._dense("time/update_s")
                evaluated = self._dense("time/eval_s")
                # The seconds of an update hold those of its evaluation; line 0 has no update.
                sums["wall_s"] = np.where(update > 0, update, evaluated)
                sums["wall_s"] += self._dense("time/warmup_s")
        wanted = np.asarray(numbers, np.int64)
        return {axis: np.cumsum(values)[wanted].tolist() for axis, values in sums.items()}

    def _dense(self, key: str) -> np.ndarray:
        # One value a line; lines without a usable one add nothing to a sum.
        found = np.zeros(self.num_lines)
        places, values = self._columns.get(key, (array("i"), array("d")))
        found[np.array(places, np.int64)] = np.nan_to_num(np.array(values), posinf=0.0, neginf=0.0)
        return found

    def last(self, keys: Sequence[str]) -> dict[str, float]:
        """Returns the last finite value of each of these metrics that has one."""
        with self._lock:
            columns = {key: np.array(self._columns[key][1]) for key in keys if key in self._columns}
        finite = {key: values[np.isfinite(values)] for key, values in columns.items()}
        return {key: float(values[-1]) for key, values in finite.items() if len(values)}

    def names(self) -> list[str]:
        """Returns the metrics that occur."""
        with self._lock:
            return list(self._columns)

    def chosen(self) -> tuple[Sequence[int], int]:
        """Returns the numbers of the lines that a page gets, and the stride between them: 1 for
        all.

        Beyond MAX_LINES these are every stride-th, the last, and those with an evaluation or a
        warning as long as they are few.
        """
        with self._lock:
            stride = math.ceil(self.num_lines / MAX_LINES)
            if stride <= 1:
                return range(self.num_lines), 1
            rare = {
                number
                for key, (numbers, _) in self._columns.items()
                if key.startswith(("eval/", "health/")) and len(numbers) <= MAX_LINES
                for number in numbers
            }
            kept = sorted(rare)[:: math.ceil(len(rare) / MAX_LINES) or 1]
            last = self.num_lines - 1
            return sorted({*range(0, last, stride), *kept, last}), stride

    def lines(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Returns these lines, in ascending order; infinite numbers and NaN (a loss that diverged)
        as text."""
        found: list[dict[str, Any]] = [{} for _ in numbers]
        wanted = np.asarray(numbers, np.int64)
        with self._lock:
            # Copies: an array that lends its memory cannot grow.
            columns = {key: tuple(map(np.array, column)) for key, column in self._columns.items()}
        for key, (places, values) in columns.items():
            at = np.searchsorted(places, wanted)
            inside = np.flatnonzero(at < len(places))
            for n in inside[places[at[inside]] == wanted[inside]]:
                value = float(values[at[n]])
                found[n][key] = value if math.isfinite(value) else str(value)
        for line in found:
            line["update"] = int(line["update"])
        return found


def clean_lines(raw: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, float]], list[str]]:
    """Returns one line of numbers an update, in order, and notes on lines that were left out.

    Of two lines of one update (a run that was resumed) the later one counts.
    """
    by_update: dict[int, dict[str, float]] = {}
    notes: list[str] = []
    repeated: list[int] = []
    unusable: list[str] = []
    for line in raw:
        update = line.get("update")
        if not isinstance(update, int | float):
            notes.append("a line of metrics.jsonl without a number of its update was left out")
            continue
        numbers = {
            key: float(value) for key, value in line.items() if isinstance(value, int | float)
        }
        unusable += [
            f"{key} of update {int(update)} is {value}"
            for key, value in line.items()
            if isinstance(value, str)
        ]
        if int(update) in by_update:
            repeated.append(int(update))
        # The later line: a resume repeats updates, and goes on from its own.
        by_update[int(update)] = numbers
    if repeated:
        notes.append(
            f"{len(repeated)} updates occur twice in metrics.jsonl (first: {repeated[0]}); the"
            " later lines count"
        )
    if unusable:
        more = f", and {len(unusable) - 3} more" if len(unusable) > 3 else ""
        notes.append(f"left out: {'; '.join(unusable[:3])}{more}")
    return [by_update[update] for update in sorted(by_update)], notes
