"""Curves over updates and over costs: training dynamics, and accuracy against what it cost."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from treegraft.runs.metrics import meaning
from treegraft.view.report.bands import Point, accuracy_band, band, spent, values_at
from treegraft.view.report.groups import Group
from treegraft.view.report.pieces import (
    Scene,
    as_percent,
    draw_band,
    fit_y,
    fits_direct,
    how_many,
    label_ends,
    whole_updates,
)
from treegraft.view.report.shape import Cell, LeftOut, Made, Table
from treegraft.view.report.style import legend_above, legend_height, looks, new_figure, printable

REWARD, ENTROPY = "reward/mean", "learn/entropy"
COSTS = (
    ("rollout/num_tool_calls", "tool calls"),
    ("rollout/num_sampled_tokens", "sampled tokens"),
    ("time/cpu_s", "processor time"),
)
DYNAMICS, COST = "training-dynamics", "accuracy-against-cost"
_DYNAMICS_TITLE, _COST_TITLE = "Training dynamics", "Accuracy against what it cost"
Curve = Sequence[tuple[float, Point]]
"""Places on the x axis with what is there."""


@dataclass(frozen=True, slots=True)
class _Cell:
    """One panel of a grid of curves."""

    title: str
    x_label: str
    y_label: str
    is_share: bool
    """Its y axis is in per cent."""
    groups: Sequence[Group]
    curves: Sequence[Curve]
    """One of each group."""


def dynamics(scene: Scene) -> Made | LeftOut:
    """Returns reward, entropy and held-out accuracy over updates."""
    wanted = [
        (REWARD, "reward", "mean reward", False),
        (ENTROPY, "entropy", "entropy (nats per token)", False),
    ]
    if scene.accuracy is not None:
        wanted.append((scene.accuracy, "held-out accuracy", "accuracy (%)", True))
    keys, notes = [], list[str]()
    for key, title, y_label, is_share in wanted:
        if any(values_at(record.lines, key) for group in scene.groups for record in group.records):
            keys.append((key, title, y_label, is_share))
        else:
            notes.append(f"No {title}: no run recorded {key}.")
    if scene.accuracy is None:
        notes.append(
            "No held-out accuracy: no run was evaluated (eval.every is 0, or none was reached)."
        )
    if not keys:
        return LeftOut(
            DYNAMICS, _DYNAMICS_TITLE, "no run has recorded reward, entropy or accuracy yet."
        )
    cells, rows = list[_Cell](), list[tuple[Cell, ...]]()
    for panel in scene.panels:
        for key, title, y_label, is_share in keys:
            groups, left = scene.curves(panel, _has(key))
            make = accuracy_band if is_share else band
            curves = [[(point.x, point) for point in make(group.records, key)] for group in groups]
            notes += [note for note in left if note not in notes] + _short(groups, key, panel)
            cells.append(_Cell(panel or title, "update", y_label, is_share, groups, curves))
            rows += [(panel, key, *row) for row in _rows(scene.of_panel(panel), key, make)]
    caption = (
        "Means over the runs of a group, at the updates that all of them have reached. "
        f"{how_many(scene.groups, is_accuracy=scene.accuracy is not None)} "
        + " ".join(f"{key}: {meaning(key)}." for key, *_ in keys)
    )
    table = Table(("panel", "metric", "group", "update", "n", "mean", "low", "high"), rows)
    return Made(DYNAMICS, _DYNAMICS_TITLE, caption, table, _draw(scene, cells, len(keys)), notes)


def _has(key: str) -> Callable[[Group], bool]:
    return lambda group: any(values_at(record.lines, key) for record in group.records)


def _rows(
    groups: Sequence[Group], key: str, make: Callable[..., list[Point]]
) -> list[tuple[Cell, ...]]:
    found = [(group.label, point) for group in groups for point in make(group.records, key)]
    return [
        (label, int(point.x), point.num, point.mean, point.low, point.high)
        for label, point in found
    ]


def _short(groups: Sequence[Group], key: str, panel: str) -> list[str]:
    """Lines on groups whose curve ends before their longest run, or that lack the metric in some
    runs."""
    found, where = [], f" ({panel})" if panel else ""
    for group in groups:
        series = [values_at(record.lines, key) for record in group.records]
        recorded = [one for one in series if one]
        shared, longest = min(max(one) for one in recorded), max(max(one) for one in recorded)
        if shared < longest:
            found.append(
                f"{group.label}{where}: {key} is drawn to update {shared}, which all its runs"
                f" reached, of {longest}."
            )
        if len(recorded) < len(series):
            found.append(
                f"{group.label}{where}: {len(series) - len(recorded)} of {len(series)} runs have no"
                f" {key}."
            )
        updates = [sum(line["update"] > 0 for line in record.lines) for record in group.records]
        sparse = [
            (len(one), num)
            for one, num in zip(series, updates, strict=True)
            if one and key == ENTROPY and len(one) < num
        ]
        if sparse:
            found.append(
                f"{group.label}{where}: {key} was recorded in {sparse[0][0]} of {sparse[0][1]}"
                " updates, those that learned."
            )
    return found


# ---------------------------------------------------------------------- accuracy against cost


def against_cost(scene: Scene) -> Made | LeftOut:
    """Returns held-out accuracy against tool calls, sampled tokens and processor time spent until
    then."""
    key = scene.accuracy
    if key is None:
        return LeftOut(
            COST,
            _COST_TITLE,
            "no run was evaluated, so there is no accuracy to set against tool calls.",
        )
    costs = [
        (cost, name) for cost, name in COSTS if any(_has(cost)(group) for group in scene.groups)
    ]
    if not costs:
        return LeftOut(
            COST, _COST_TITLE, "no run has recorded tool calls, sampled tokens or processor time."
        )
    cells, rows, notes = list[_Cell](), list[tuple[Cell, ...]](), list[str]()
    for panel in scene.panels:
        for cost, name in costs:

            def is_shown(group: Group, cost: str = cost) -> bool:
                return _has(key)(group) and _is_spent(group, cost)

            groups, left = scene.curves(panel, is_shown)
            scale, unit = _unit(
                cost, [x for group in groups for x, _ in cost_curve(group, cost, key)]
            )
            curves = [
                [(x / scale, point) for x, point in cost_curve(group, cost, key)]
                for group in groups
            ]
            notes += [note for note in left if note not in notes]
            cells.append(
                _Cell(
                    panel, f"{name} so far ({unit})", "held-out accuracy (%)", True, groups, curves
                )
            )
            for group in scene.of_panel(panel):
                rows += [
                    (panel, cost, group.label, int(p.x), p.num, x, p.mean, p.low, p.high)
                    for x, p in cost_curve(group, cost, key)
                ]
    caption = (
        "Each point is an evaluation: its place across is the mean over the group's runs of what"
        " training had spent by then, evaluation left out."
        f" {how_many(scene.groups, is_accuracy=True)} {key}: {meaning(key)}."
    )
    table = Table(
        ("panel", "cost", "group", "update", "n", "spent", "accuracy", "low", "high"), rows
    )
    return Made(COST, _COST_TITLE, caption, table, _draw(scene, cells, len(costs)), notes)


def _is_spent(group: Group, cost: str) -> bool:
    return any(
        value > 0 for record in group.records for value in spent(record.lines, cost).values()
    )


def _unit(cost: str, values: Sequence[float]) -> tuple[float, str]:
    is_time = cost.startswith("time/")
    scale = 1000.0 if max(values, default=0.0) >= 5000 else 1.0
    names = {
        (True, 1.0): "s",
        (True, 1000.0): "1,000 s",
        (False, 1.0): "number",
        (False, 1000.0): "thousands",
    }
    return scale, names[is_time, scale]


def cost_curve(group: Group, cost: str, key: str) -> list[tuple[float, Point]]:
    """Returns for each evaluation that all runs of a group have reached the mean cost until then,
    and the accuracy."""
    records = [record for record in group.records if values_at(record.lines, key)]
    costs = [spent(record.lines, cost) for record in records]
    return [
        (statistics.fmean(one[int(point.x)] for one in costs), point)
        for point in accuracy_band(records, key)
    ]


# ---------------------------------------------------------------------- drawing


def _draw(scene: Scene, cells: Sequence[_Cell], num_columns: int) -> Any:
    """Draws a grid: a row for each panel of the scene, or, where each has one cell, three beside
    each other."""
    cells = [cell for cell in cells if any(cell.curves)]
    columns = num_columns if num_columns > 1 else min(3, len(cells))
    rows = -(-len(cells) // columns)
    present = {group.label for cell in cells for group in cell.groups}
    labels = [printable(label, 40) for label in scene.drawn if label in present]
    is_direct = rows == 1 and len(labels) == len(cells[-1].groups) and fits_direct(labels)
    top = 0.0 if is_direct or len(labels) == 1 else legend_height(labels)
    figure, axes = new_figure(rows, columns, (2.15 if columns > 1 else 2.9) * rows, top=top)
    for one in axes[len(cells) :]:
        one.set_axis_off()
    for one, cell in zip(axes, cells, strict=False):
        _draw_cell(scene, one, cell)
    if top:
        legend_above(figure, axes)
    elif len(labels) > 1:
        last = zip(cells[-1].groups, cells[-1].curves, strict=True)
        figure.canvas.draw()
        label_ends(
            axes[len(cells) - 1],
            [
                (curve[-1][0], curve[-1][1].mean, printable(g.label), _look(scene, g)["color"])
                for g, curve in last
                if curve
            ],
        )
    return figure


def _look(scene: Scene, group: Group) -> dict[str, Any]:
    return looks(scene.look(group.label) or 0)


def _draw_cell(scene: Scene, axes: Any, cell: _Cell) -> None:
    for group, curve in zip(cell.groups, cell.curves, strict=True):
        if curve:
            draw_band(
                axes,
                [point for _, point in curve],
                printable(group.label, 40),
                _look(scene, group),
                [x for x, _ in curve],
            )
    axes.set_title(printable(cell.title, 44))
    axes.set_xlabel(cell.x_label)
    axes.set_ylabel(cell.y_label)
    if cell.x_label == "update":
        whole_updates(axes)
    if cell.is_share:
        as_percent(axes)
        axes.set_ylim(-0.02, 1.02)
    else:
        fit_y(axes, [point for curve in cell.curves for _, point in curve])


__all__ = ["COST", "COSTS", "DYNAMICS", "against_cost", "cost_curve", "dynamics"]
