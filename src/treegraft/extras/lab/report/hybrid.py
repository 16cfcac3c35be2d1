"""On-policy against hybrid trajectories, from recorded trees: reward, reward within a tree, and
sampled tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product
from statistics import fmean
from typing import Any

from treegraft import Origin, Tree
from treegraft.extras.lab.report.bands import Point, shared_points
from treegraft.extras.lab.report.drawing import (
    add_legend,
    draw_band,
    fit_y,
    looks,
    new_figure,
    printable,
    whole_updates,
)
from treegraft.extras.lab.report.figure import Cell, MissingFigure, ReportFigure, Table
from treegraft.extras.lab.report.groups import Group, ReportData, count_note
from treegraft.extras.lab.report.trees import MOST_FILES
from treegraft.parts import GraftCause

KINDS = ("on-policy", "hybrid")
_MEASURES = ("reward", "num_sampled", "num_calls")
_GAP = "reward, hybrid less on-policy of the same tree"
_DRAWN = (
    ("reward", "mean reward"),
    (_GAP, "reward gap within a tree"),
    ("num_sampled", "sampled tokens a trajectory"),
)
"""Tool calls stand in the table only."""
_MOST_ROWS = 3
_LOOKS = {"on-policy": looks(4), "hybrid": looks(5), "gap": looks(6)}
"""Other colours than the first groups have."""


class TreeMeans:
    """Means over the trajectories of a run by measure, kind and update."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], dict[int, list[float]]]
        self.values = defaultdict(lambda: defaultdict(list))
        """(measure, kind) -> update -> one value per trajectory; of kind "gap" one for each tree
        with both kinds: the mean reward of its hybrid trajectories less that of the others."""

    def add(self, update: int, tree: Tree) -> None:
        """Counts the trajectories of a tree; those lost to failures of ours count nowhere."""
        rewards = defaultdict[str, list[float]](list)
        for path in tree.trajectories():
            if path.reward is None:
                continue
            kind = KINDS[any(isinstance(step.cause, GraftCause) for step in path.steps)]
            rewards[kind].append(path.reward)
            found = (path.reward, path.origins.count(Origin.POLICY), path.num_tool_calls)
            for measure, value in zip(_MEASURES, found, strict=True):
                self.values[measure, kind][update].append(value)
        if len(rewards) == len(KINDS):
            gap = fmean(rewards["hybrid"]) - fmean(rewards["on-policy"])
            self.values[_GAP, "gap"][update].append(gap)

    @property
    def has_hybrid(self) -> bool:
        """Whether any trajectory holds a graft."""
        return ("reward", "hybrid") in self.values

    def curves(self) -> dict[tuple[str, str], dict[int, float]]:
        """Returns means by update for each measure and kind; the gap has one kind, "gap"."""
        keys = [*product(_MEASURES, KINDS), (_GAP, "gap")]
        return {
            key: {update: fmean(cell) for update, cell in sorted(self.values.get(key, {}).items())}
            for key in keys
        }


def hybrid(data: ReportData) -> ReportFigure | MissingFigure:
    """Returns reward, reward within a tree, and sampled tokens of trajectories with a graft and
    without one."""
    title = "On-policy against hybrid trajectories"
    notes, means = list[str](), dict[str, TreeMeans]()
    for record in (record for group in data.groups for record in group.records):
        if record.run is not None:
            reading = data.trees.of(record.run)
            notes += reading.notes
            if (one := reading.of(TreeMeans)).values:
                means[record.name] = one
    hybrids = {name for name, one in means.items() if one.has_hybrid}
    grafted = [one for one in data.groups if hybrids & {record.name for record in one.records}]
    if not grafted:
        why = "no trajectory of these runs holds a retrieved step."
        if not means:
            why = "no run folder with recorded trees was given."
        return MissingFigure(title, " ".join([why, *notes]))
    drawn = grafted[:_MOST_ROWS]
    figure, axes = new_figure(len(drawn), len(_DRAWN), 2.1 * len(drawn))
    rows = list[tuple[Cell, ...]]()
    for row, group in enumerate(grafted):
        bands = _bands(group, means)
        rows += [
            (group.panel, group.label, measure, kind, int(p.x), p.num, p.mean, p.low, p.high)
            for (measure, kind), points in bands.items()
            for p in points
        ]
        for column, (measure, name) in enumerate(_DRAWN if row < len(drawn) else ()):
            panel = axes[row * len(_DRAWN) + column]
            curves = {kind: points for (own, kind), points in bands.items() if own == measure}
            _draw_kinds(panel, curves, name)
            if column == 0:
                panel.set_title(printable(group.label, 30))
    add_legend(figure, axes)
    caption = (
        "Means over the trajectories of an update; hybrid: holds at least one retrieved step,"
        " which counts neither as sampled tokens nor as calls. A trajectory that ends early has"
        " less occasion to be grafted, so the kinds differ in their questions; the gap is between"
        " trajectories of one tree, so of one question (hybrid less on-policy). At most"
        f" {MOST_FILES} updates of a run are read, spread evenly. {count_note(grafted)}"
    )
    if len(grafted) > _MOST_ROWS:
        left = ", ".join(group.label for group in grafted[_MOST_ROWS:])
        notes.append(f"For want of room in the table only: {left}.")
    columns = ("panel", "group", "measure", "kind", "update", "n", "mean", "low", "high")
    return ReportFigure(title, caption, Table(columns, rows), figure, notes)


def _bands(group: Group, means: Mapping[str, TreeMeans]) -> dict[tuple[str, str], list[Point]]:
    """By measure and kind, at the updates that all runs with any have."""
    curves = [means[record.name].curves() for record in group.records if record.name in means]
    return {key: shared_points([one[key] for one in curves]) for key in curves[0]}


def _draw_kinds(axes: Any, curves: Mapping[str, Sequence[Point]], name: str) -> None:
    for kind, points in curves.items():
        if points:
            draw_band(axes, [point.x for point in points], points, kind, _LOOKS[kind])
    fit_y(axes, [one for points in curves.values() for one in points])
    if "gap" in curves:
        axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xlabel("update")
    axes.set_ylabel(name)
    whole_updates(axes)
