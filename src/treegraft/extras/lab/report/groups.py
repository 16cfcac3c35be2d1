"""Groups of runs that are one method with other seeds, and their statistics."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from treegraft.extras.lab.report.records import Record
from treegraft.extras.statistics import Interval, student, wilson

_UNNAMED = re.compile(r"-seed\d+-\d{8}-\d{6}(-\d+)*$")
"""The end of the name that a run gets without run.name."""


@dataclass(frozen=True, slots=True)
class Point:
    """A mean over runs at one place: Point(x=10, mean=0.5, interval=(0.4, 0.6), num=3)"""

    x: float
    mean: float
    interval: Interval | None
    """95 %: over runs Student's t; of one run's accuracy Wilson's, over its held-out tasks."""
    num: int
    """Runs."""
    update: int = 0

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        """The interval's ends; None without one."""
        return self.interval or (None, None)

    @property
    def whiskers(self) -> tuple[float, float]:
        """The lengths below and above the mean; 0 without an interval."""
        low, high = self.interval or (self.mean, self.mean)
        # Rounding may put the bound of a share of 0 or 1 a little beyond it.
        return max(0.0, self.mean - low), max(0.0, high - self.mean)


@dataclass(frozen=True, slots=True)
class Group:
    """Runs that differ in name and seed alone: Group("GRPO", "", (record, record))"""

    label: str
    world: str
    """Groups of one world are compared with each other."""
    records: tuple[Record, ...]

    @property
    def title(self) -> str:
        """Its label, with the world if there is one."""
        return f"{self.label} ({self.world})" if self.world else self.label

    def series(self, key: str) -> list[dict[int, float]]:
        """Returns the values of a metric by update, for each run that recorded it."""
        found = []
        for record in self.records:
            if values := record.values(key):
                found.append(values)
        return found

    def band(self, key: str, *, is_accuracy: bool = False) -> list[Point]:
        """Returns the mean of a metric with its interval, at the updates that all runs with this
        metric have reached: beyond them the mean would jump where a run ends."""
        series = self.series(key)
        shared = sorted(set.intersection(*map(set, series))) if series else []
        points = []
        for update in shared:
            mean, interval = self._mean([one[update] for one in series], key, is_accuracy)
            points.append(Point(update, mean, interval, len(series), update))
        return points

    def ends(self, key: str) -> list[float]:
        """Returns the last value of a metric in each run that has one."""
        return [one[max(one)] for one in self.series(key)]

    def final(self, key: str) -> Point | None:
        """Returns the mean of the last values of an accuracy; None if no run was evaluated."""
        found = self.ends(key)
        if not found:
            return None
        mean, interval = self._mean(found, key, is_accuracy=True)
        if interval is not None:
            interval = (max(0.0, interval[0]), min(1.0, interval[1]))
        return Point(0, mean, interval, len(found))

    def _mean(
        self, values: Sequence[float], key: str, is_accuracy: bool
    ) -> tuple[float, Interval | None]:
        # One run says nothing of other seeds, but its tasks have an interval of their own.
        if is_accuracy and len(values) == 1:
            num_eval = next(one.num_eval for one in self.records if one.values(key))
            return values[0], wilson(values[0], num_eval) if num_eval else None
        return student(values)

    def gains(self, base: Group, key: str) -> list[float]:
        """Returns for each seed that both have the difference of their accuracies, at the last
        update that both evaluated. Runs of one seed share tasks and initial weights, so their
        difference has less variance."""
        # Seeds pair runs, as in tables of studies.
        by_seed = {one.seed: one.values(key) for one in base.records}
        found = []
        for record in self.records:
            mine = record.values(key)
            theirs = by_seed.get(record.seed, {}) if record.seed is not None else {}
            if shared := set(mine) & set(theirs):
                found.append(mine[max(shared)] - theirs[max(shared)])
        return found


def group(records: Sequence[Record]) -> list[Group]:
    """Returns the groups in the order in which their first runs were named: runs with one label of
    the user's or a study's, else those with equal settings, by their name."""
    by_key: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        own = f"settings {frozen(record.settings)}" if record.label is None else record.label
        by_key.setdefault((record.world, own), []).append(record)
    labels: Counter[tuple[str, str]] = Counter()
    found = []
    for (world, _), members in by_key.items():
        label = members[0].label or _UNNAMED.sub("", members[0].name)
        labels[world, label] += 1
        # Two groups may have one name if their settings differ.
        if labels[world, label] > 1:
            label = f"{label} ({labels[world, label]})"
        found.append(Group(label, world, tuple(members)))
    return found


def differing(records: Sequence[Record]) -> list[str]:
    """Returns the settings whose values differ among runs, missing counting as a value, in
    order."""
    found = []
    for name in dict.fromkeys(name for record in records for name in record.settings):
        if len({frozen(record.settings.get(name, "-")) for record in records}) > 1:
            found.append(name)
    return found


def notes_on(groups: Sequence[Group]) -> list[str]:
    """Returns remarks on groups: settings that differ within a label, seeds that come twice, and
    those on their runs."""
    found = []
    for one in groups:
        # A label of the user's joins runs whatever their settings.
        if pooled := differing(one.records):
            more = f" and {len(pooled) - 4} more" if len(pooled) > 4 else ""
            found.append(
                f"{one.title}: its runs differ in {', '.join(pooled[:4])}{more} too; they are one"
                " group because of their label."
            )
        seeds = Counter(record.seed for record in one.records if record.seed is not None)
        if twice := sorted(seed for seed, count in seeds.items() if count > 1):
            found.append(
                f"{one.title}: seed {', '.join(map(str, twice))} comes more than once; such runs"
                " are not independent."
            )
        for record in one.records:
            found += [f"{record.name}: {note}." for note in record.notes]
    return found


def frozen(value: Any) -> str:
    """Returns a setting's value as text by which equal ones are found."""
    return json.dumps(value, sort_keys=True, default=str)
