"""Groups of runs that are one method with other seeds, their labels, and which of them may be
compared."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treegraft import Config
from treegraft.extras.lab.report.records import Record
from treegraft.extras.lab.report.trees import TreeReader
from treegraft.parts import setting_rows

"""Settings of the tasks that change the off-policy agent alone."""
MOST_CURVES = 7
"""Groups whose curves one panel can hold apart."""
INTERVAL_SEEDS = "95 % interval of the mean over runs with other seeds (Student's t)"
INTERVAL_TASKS = "95 % interval over held-out tasks (Wilson)"
_GIVEN = re.compile(r"-seed\d+-\d{8}-\d{6}(-\d+)*$")
"""The end of the name that a run gets without run.name."""
_ENDS = re.compile(r"[-_. ]*(seed|s)?[-_. ]*\d*$")
_MOST = 60
"""Characters of a label."""


@functools.cache
def source_settings() -> tuple[str, ...]:
    """Returns the names of the settings that decide whose steps are retrieved."""
    return tuple(row.name for row in setting_rows(Config()) if row.is_source)


def is_expert(name: str) -> bool:
    """Returns whether a setting is one of the tasks' expert."""
    return name.startswith("tasks.") and name in source_settings()


@dataclass(frozen=True, slots=True)
class Group:
    """Runs that differ in name and seed alone: Group("GRPO", "", (record, record))"""

    label: str
    panel: str
    """Groups of one panel are compared with each other; "" where there is one panel only."""
    records: tuple[Record, ...]

    @property
    def title(self) -> str:
        """Its label, with the panel where there are several."""
        return f"{self.label} ({self.panel})" if self.panel else self.label


@dataclass(frozen=True, slots=True)
class ReportData:
    """The data that all figures of a report are drawn from."""

    groups: Sequence[Group]
    accuracy: str | None
    """Key of the accuracy that most runs recorded; None: none did."""
    baseline: str | None
    """Label of the group that others are compared with; None: nothing is."""
    trees: TreeReader
    """What the figures made from trees count in them."""

    @property
    def panels(self) -> list[str]:
        """Returns the names of the panels, in order."""
        return list(dict.fromkeys(group.panel for group in self.groups))

    def of_panel(self, panel: str) -> list[Group]:
        """Returns a panel's groups, in the same order in all panels."""
        order = list(dict.fromkeys(group.label for group in self.groups))
        return sorted(
            (group for group in self.groups if group.panel == panel),
            key=lambda group: order.index(group.label),
        )

    @property
    def drawn(self) -> list[str]:
        """Returns the labels that get a curve and a colour of their own, in order: at most
        `MOST_CURVES`, those with most runs in a panel first."""
        runs = Counter[str]()
        for group in self.groups:
            runs[group.label] = max(runs[group.label], len(group.records))
        chosen = sorted(runs, key=lambda label: -runs[label])[:MOST_CURVES]
        return [label for label in runs if label in chosen]

    def look(self, label: str) -> int | None:
        """Returns the number of a label's colour, the same in all figures; None for a label that is
        not drawn as a curve."""
        drawn = self.drawn
        return drawn.index(label) if label in drawn else None

    def curves(self, panel: str, fits: Callable[[Group], bool]) -> tuple[list[Group], list[str]]:
        """Returns the groups of a panel whose curves are drawn, and a line on those for which there
        is no room."""
        drawn, fitting = self.drawn, [group for group in self.of_panel(panel) if fits(group)]
        left = [group.label for group in fitting if group.label not in drawn]
        where = f" in panel {panel}" if panel else ""
        note = f"For want of room no curve{where} of: {', '.join(left)}; bars and table have them."
        return [group for group in fitting if group.label in drawn], [note] if left else []


def count_note(groups: Sequence[Group], *, is_accuracy: bool = False) -> str:
    """Returns the sentences on n and intervals for a caption."""
    counts = sorted({len(group.records) for group in groups})
    span = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    if counts[-1] > 1:
        one = f" Where n = 1: {INTERVAL_TASKS}." if is_accuracy and counts[0] == 1 else ""
        return (
            f"n = {span} runs with other seeds; bands and whiskers: {INTERVAL_SEEDS}, cut at the"
            f" panels' edges.{one}"
        )
    if is_accuracy:
        return (
            f"n = 1 run each. Bands and whiskers: {INTERVAL_TASKS}; the spread over seeds is not"
            " known."
        )
    return "n = 1 run each: no interval, the spread over seeds is not known."


def group(records: Sequence[Record]) -> list[Group]:
    """Returns the groups in the order in which their first runs were given.

    Runs with one label of the user's are one group; of the others those whose settings are equal
    but for those that only label a run.
    """
    panels = _panels(records)
    by_key: dict[tuple[str, str], list[Record]] = {}
    for record, panel in zip(records, panels, strict=True):
        own = f"label {record.label}"
        if record.label is None:
            own = f"settings {_frozen(record.settings)}"
        by_key.setdefault((panel, own), []).append(record)
    labels = _labels(list(by_key.values()), [panel for panel, _ in by_key])
    return [
        Group(label, panel, tuple(members))
        for label, (panel, _), members in zip(labels, by_key, by_key.values(), strict=True)
    ]


def _frozen(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


# ---------------------------------------------------------------------- panels


def _panels(records: Sequence[Record]) -> list[str]:
    """The world of a study's runs; of run folders the settings of tasks in which they differ."""
    tasks = [
        {n: v for n, v in record.settings.items() if n.startswith("tasks.") and not is_expert(n)}
        for record in records
    ]
    names = differing(
        [found for found, record in zip(tasks, records, strict=True) if record.world is None]
    )
    return [
        _said(record, names, names) if record.world is None else record.world for record in records
    ]


def _said(record: Record, own: Sequence[str], names: Sequence[str]) -> str:
    """The values of the settings `own`, each by the shortest name that is clear among `names`."""
    return ", ".join(f"{short(name, names)} = {show(record.settings.get(name))}" for name in own)


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the names whose values differ among these settings, missing counting as a value, in
    order."""
    names = dict.fromkeys(name for one in settings for name in one)
    return [name for name in names if len({_value(one, name) for one in settings}) > 1]


def _value(settings: Mapping[str, Any], name: str) -> str:
    # Not the text of any JSON value, so that a missing setting differs from all that are there.
    return _frozen(settings[name]) if name in settings else "missing"


# ---------------------------------------------------------------------- labels


def _labels(groups: Sequence[Sequence[Record]], panels: Sequence[str]) -> list[str]:
    """A group is named as its runs are; where that does not tell groups apart, by the settings in
    which it differs from most groups, or from all others."""
    stems = [one[0].label or _cut(_stem([record.name for record in one])) for one in groups]
    if all(stems) and len({*zip(panels, stems, strict=True)}) == len(stems):
        return stems
    firsts = [members[0] for members in groups]
    unnamed = [record for record in firsts if record.label is None]
    names = differing([record.settings for record in unnamed])
    common: dict[str, str | None] = {}
    for name in names:
        values = Counter(_value(record.settings, name) for record in unnamed)
        value, count = values.most_common(1)[0]
        common[name] = value if count > len(unnamed) / 2 else None
    # The panel names the tasks already.
    names = [name for name in names if not name.startswith("tasks.") or is_expert(name)]
    labels = [
        one[0].label if one[0].label is not None else _label(one, names, common) for one in groups
    ]
    counts: Counter[tuple[str, str]] = Counter()
    for place, at in enumerate(zip(panels, labels, strict=True)):
        counts[at] += 1
        if counts[at] > 1:
            labels[place] = f"{at[1]} ({counts[at]})"
    return labels


def _stem(names: Sequence[str]) -> str:
    """What the names of a group's runs begin with, without the seed and the time of a run that was
    not named; "" where they have nothing in common."""
    own = [_GIVEN.sub("", name) for name in names]
    if len({*own}) == 1:
        return own[0]
    # What the first and the last in order share, all share.
    first, last = min(own), max(own)
    shared = next(n for n in range(len(last)) if first[: n + 1] != last[: n + 1])
    return _ENDS.sub("", first[:shared])


def _label(
    members: Sequence[Record], names: Sequence[str], common: Mapping[str, str | None]
) -> str:
    record = members[0]
    if not names:
        return record.name if len(members) == 1 else "equal settings"
    own = [
        name
        for name in names
        if common[name] is None or _value(record.settings, name) != common[name]
    ]
    said = _said(record, own, names) or "common settings"
    return _cut(said)


def _cut(label: str) -> str:
    return label if len(label) <= _MOST else label[: _MOST - 1] + "…"


def short(name: str, names: Sequence[str]) -> str:
    """Returns the shortest end of a dotted name that no other of `names` has: "lr" of "learn.lr"
    beside "loss.clip_low"."""
    parts = name.split(".")
    for start in range(len(parts) - 1, -1, -1):
        end = ".".join(parts[start:])
        if sum(f".{other}".endswith(f".{end}") for other in names) <= 1:
            return end
    return name


def show(value: Any) -> str:
    """Returns a setting's value as it stands in a label: the end of a path, a list's parts with a
    plus."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:g}"
    if isinstance(value, list):
        return " + ".join(show(part) for part in value) or "none"
    if isinstance(value, Mapping):
        return _frozen(value)
    text = str(value).rstrip("/")
    return text.rpartition("/")[2] if text.startswith(("/", "./", "~", "runs/")) else text


# ---------------------------------------------------------------------- studies of one setting


def pooled_differences(members: Group) -> list[str]:
    """Returns the settings that differ within a group of the user's label."""
    return differing([record.settings for record in members.records])


def vary(groups: Sequence[Group], names: Sequence[str]) -> list[list[Group]]:
    """Returns sets of groups that differ in one or more of `names` and in nothing else, over all
    panels.

    What differs within a group of the user's label (the warm-up that each seed began with, say)
    does not count; a group within which one of `names` differs stands in no set.
    """
    pooled = {name for one in groups for name in pooled_differences(one)}
    sets: dict[str, dict[str, Group]] = {}
    for one in groups:
        settings = one.records[0].settings
        if not any(name in settings for name in names) or set(names) & set(pooled_differences(one)):
            continue
        others = settings.keys() - {*names, *pooled}
        rest = _frozen({name: settings[name] for name in others})
        own = _frozen({name: settings.get(name) for name in names})
        sets.setdefault(rest, {}).setdefault(own, one)
    return [list(found.values()) for found in sets.values() if len(found) > 1]
