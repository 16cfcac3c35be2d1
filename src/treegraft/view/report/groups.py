"""Which runs are one method with other seeds, what such a group is called, and which groups may be
compared at all."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treegraft.settings.config import settings_with
from treegraft.view.report.records import Record

EXPERT = tuple(name for name in settings_with("retrieval_source") if name.startswith("tasks."))
"""Settings of the tasks that change the off-policy agent alone."""
_MOST = 60
"""Characters of a label."""


@dataclass(frozen=True, slots=True)
class Group:
    """Runs that differ in name and seed alone: Group("GRPO", "", (record, record))"""

    label: str
    panel: str
    """Groups of one panel are compared with each other; "" where there is one panel only."""
    records: tuple[Record, ...]


def group(records: Sequence[Record]) -> list[Group]:
    """Returns the groups in the order in which their first runs were given.

    Runs with one label of the user's are one group; of the others those whose settings are equal
    but for those that only label a run.
    """
    panels = _panels(records)
    by_key: dict[tuple[str, str], list[Record]] = {}
    for record, panel in zip(records, panels, strict=True):
        own = (
            f"label {record.label}"
            if record.label is not None
            else f"settings {_frozen(record.settings)}"
        )
        by_key.setdefault((panel, own), []).append(record)
    labels = _labels(list(by_key.values()), [panel for panel, _ in by_key])
    return [
        Group(label, panel, tuple(members))
        for label, (panel, _), members in zip(labels, by_key, by_key.values(), strict=True)
    ]


def _frozen(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True, default=str)


# ---------------------------------------------------------------------- panels


def _panels(records: Sequence[Record]) -> list[str]:
    """A study says its worlds; of folders those with other tasks are apart, whatever the agent
    learned from."""
    tasks = [
        {n: v for n, v in record.settings.items() if n.startswith("tasks.") and n not in EXPERT}
        for record in records
    ]
    names = differing(
        [found for found, record in zip(tasks, records, strict=True) if record.world is None]
    )
    found = []
    for record in records:
        own = ", ".join(
            f"{short(name, names)} = {show(record.settings.get(name))}" for name in names
        )
        found.append(own if record.world is None else record.world)
    return found


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the names whose values differ among these settings, missing counting as a value, in
    order."""
    names = dict.fromkeys(name for one in settings for name in one)
    return [name for name in names if len({_value(one, name) for one in settings}) > 1]


def _value(settings: Mapping[str, Any], name: str) -> str:
    return (
        json.dumps(settings[name], sort_keys=True, default=str) if name in settings else "missing"
    )


# ---------------------------------------------------------------------- labels


def _labels(groups: Sequence[Sequence[Record]], panels: Sequence[str]) -> list[str]:
    """A group is named by the settings in which it differs from what most groups have, or from each
    other."""
    firsts = [members[0] for members in groups]
    unnamed = [record for record in firsts if record.label is None]
    names = differing([record.settings for record in unnamed])
    common = {
        name: _majority([_value(record.settings, name) for record in unnamed]) for name in names
    }
    by_panel = [name for name in names if name.startswith("tasks.") and name not in EXPERT]
    names = [name for name in names if name not in by_panel]
    labels = [
        one[0].label if one[0].label is not None else _label(one, names, common) for one in groups
    ]
    return list(_unique(labels, panels))


def _majority(values: Sequence[str]) -> str | None:
    value, count = Counter(values).most_common(1)[0]
    return value if count > len(values) / 2 else None


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
    said = (
        ", ".join(f"{short(name, names)} = {show(record.settings.get(name))}" for name in own)
        or "common settings"
    )
    return said if len(said) <= _MOST else said[: _MOST - 1] + "…"


def _unique(labels: Sequence[str], panels: Sequence[str]) -> Iterator[str]:
    counts: Counter[tuple[str, str]] = Counter()
    for label, panel in zip(labels, panels, strict=True):
        counts[panel, label] += 1
        yield label if counts[panel, label] == 1 else f"{label} ({counts[panel, label]})"


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
        return json.dumps(value, sort_keys=True, default=str)
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
        rest = _frozen(
            {
                name: value
                for name, value in settings.items()
                if name not in names and name not in pooled
            }
        )
        own = _frozen({name: settings.get(name) for name in names})
        sets.setdefault(rest, {}).setdefault(own, one)
    return [list(found.values()) for found in sets.values() if len(found) > 1]
