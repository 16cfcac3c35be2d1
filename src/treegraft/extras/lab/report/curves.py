"""Curves over updates and over costs: training dynamics, and accuracy against its cost."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from treegraft.extras.lab.report.bands import Point, accuracy_band, band, spent, values_at
from treegraft.extras.lab.report.drawing import (
    add_legend,
    as_percent,
    draw_band,
    fit_y,
    looks,
    new_figure,
    printable,
    whole_updates,
)
from treegraft.extras.lab.report.figure import Cell, MissingFigure, ReportFigure, Table
from treegraft.extras.lab.report.groups import Group, ReportData, count_note
from treegraft.parts import RunReader

REWARD, ENTROPY = "reward/mean", "learn/entropy"
CALLS, TOKENS = "rollout/num_tool_calls", "rollout/num_sampled_tokens"
ROLLOUT_S, LEARN_S, DISTANCE = "time/rollout_s", "time/learn_s", "diversity/distance"
COSTS = (
    (CALLS, "tool calls"),
    (TOKENS, "sampled tokens"),
    ("time/cpu_s", "processor time"),
)


@dataclass(frozen=True, slots=True)
class _Panel:
    """One panel of a grid of curves."""

    title: str
    x_label: str
    y_label: str
    is_share: bool
    """Its y axis is in per cent."""
    curves: Sequence[tuple[Group, Sequence[tuple[float, Point]]]]
    """Groups with their points and where these stand on the x axis."""


def _has(group: Group, key: str) -> bool:
    return any(values_at(record.lines, key) for record in group.records)


def dynamics(data: ReportData) -> ReportFigure | MissingFigure:
    """Returns reward, entropy and held-out accuracy over updates."""
    wanted: list[_Wanted] = [
        (REWARD, "reward", "mean reward", False),
        (ENTROPY, "entropy", "entropy (nats per token)", False),
    ]
    notes = []
    if data.accuracy is not None:
        wanted.append((data.accuracy, "held-out accuracy", "accuracy (%)", True))
    else:
        notes.append(
            "No held-out accuracy: no run was evaluated (eval.every is 0, or none was reached)."
        )
    return _over_updates("Training dynamics", data, wanted, notes)


def efficiency(data: ReportData) -> ReportFigure | MissingFigure:
    """Returns the seconds of rollouts and of learning, tool calls and sampled tokens of each update
    (RAPO, arXiv 2603.03078, figures 3 and 11)."""
    wanted: list[_Wanted] = [
        (ROLLOUT_S, "rollouts", "seconds", False),
        (LEARN_S, "learning", "seconds", False),
        (CALLS, "tool calls", "calls", False),
        (TOKENS, "sampled tokens", "tokens", False),
    ]
    return _over_updates("Efficiency", data, wanted)


def entropy_and_tokens(data: ReportData) -> ReportFigure | MissingFigure:
    """Returns entropy and sampled tokens of each update (RAPO, arXiv 2603.03078, figure 10)."""
    wanted: list[_Wanted] = [
        (ENTROPY, "entropy", "entropy (nats per token)", False),
        (TOKENS, "sampled tokens", "tokens", False),
    ]
    return _over_updates("Entropy and tokens", data, wanted)


def diversity(data: ReportData) -> ReportFigure | MissingFigure:
    """Returns how far the rollouts of a task lie apart, by update (RAPO, arXiv 2603.03078, figure
    4, which counts clusters)."""
    return _over_updates("Diversity", data, [(DISTANCE, "diversity", "cosine distance", False)])


_Wanted = tuple[str, str, str, bool]
"""A metric, the title of its panel, the label of its axis, and whether it is a share."""
_MEANINGS = {DISTANCE: "mean cosine distance between two rollouts of a task, question left out"}


def _over_updates(
    figure_title: str, data: ReportData, wanted: Sequence[_Wanted], notes: Sequence[str] = ()
) -> ReportFigure | MissingFigure:
    """Metrics over updates, each a column of panels."""
    notes = [*notes]
    keys = [one for one in wanted if any(_has(group, one[0]) for group in data.groups)]
    absent = [one for one in wanted if one not in keys]
    notes += [f"No {name}: no run recorded {key}." for key, name, *_ in absent]
    if not keys:
        names = ", ".join(name for _, name, *_ in wanted)
        return MissingFigure(figure_title, f"no run has recorded {names}.")
    panels, rows = list[_Panel](), list[tuple[Cell, ...]]()
    for panel in data.panels:
        for key, title, y_label, is_share in keys:
            groups, left = data.curves(panel, partial(_has, key=key))
            points_of: Callable[..., list[Point]] = accuracy_band if is_share else band
            curves = [
                (group, [(point.x, point) for point in points_of(group.records, key)])
                for group in groups
            ]
            notes += [note for note in left if note not in notes]
            notes += _incomplete(groups, key)
            panels.append(_Panel(panel or title, "update", y_label, is_share, curves))
            rows += [
                (panel, key, group.label, int(p.x), p.num, p.mean, p.low, p.high)
                for group in data.of_panel(panel)
                for p in points_of(group.records, key)
            ]
    caption = (
        "Means over the runs of a group, at the updates that all of them have reached. "
        f"{count_note(data.groups, is_accuracy=data.accuracy is not None)} "
        + " ".join(f"{key}: {_MEANINGS.get(key) or RunReader.meaning(key)}." for key, *_ in keys)
    )
    table = Table(("panel", "metric", "group", "update", "n", "mean", "low", "high"), rows)
    return ReportFigure(figure_title, caption, table, _draw(data, panels, len(keys)), notes)


def _incomplete(groups: Sequence[Group], key: str) -> list[str]:
    """Lines on groups whose curve ends before their longest run, or that lack the metric in some
    runs or updates."""
    found = []
    for group in groups:
        where = group.title
        series = [values_at(record.lines, key) for record in group.records]
        recorded = [one for one in series if one]
        ends = [max(one) for one in recorded]
        shared, longest = min(ends), max(ends)
        if shared < longest:
            found.append(
                f"{where}: {key} is drawn to update {shared}, which all its runs reached, of"
                f" {longest}."
            )
        if len(recorded) < len(series):
            found.append(
                f"{where}: {len(series) - len(recorded)} of {len(series)} runs have no {key}."
            )
        for record, one in zip(group.records, series, strict=True):
            updates = sum(line["update"] > 0 for line in record.lines)
            if key == ENTROPY and one and len(one) < updates:
                found.append(
                    f"{where}: {key} was recorded in {len(one)} of {updates} updates, those that"
                    " learned."
                )
                break
    return found


# ---------------------------------------------------------------------- accuracy against cost


def against_cost(data: ReportData) -> ReportFigure | MissingFigure:
    """Returns held-out accuracy against the tool calls, sampled tokens and processor time spent
    until then."""
    title, key = "Accuracy against its cost", data.accuracy
    if key is None:
        why = "no run was evaluated, so there is no accuracy to set against tool calls."
        return MissingFigure(title, why)

    def has_both(group: Group, cost: str) -> bool:
        totals = (value for one in group.records for value in spent(one.lines, cost).values())
        return _has(group, key) and any(value > 0 for value in totals)

    costs = [(cost, name) for cost, name in COSTS if any(_has(one, cost) for one in data.groups)]
    if not costs:
        why = "no run has recorded tool calls, sampled tokens or processor time."
        return MissingFigure(title, why)
    panels, rows, notes = list[_Panel](), list[tuple[Cell, ...]](), list[str]()
    for panel in data.panels:
        for cost, name in costs:
            groups, left = data.curves(panel, partial(has_both, cost=cost))
            notes += [note for note in left if note not in notes]
            curves = [(group, cost_curve(group, cost, key)) for group in groups]
            most = max((x for _, curve in curves for x, _ in curve), default=0.0)
            scale = 1000.0 if most >= 5000 else 1.0
            units = ("s", "1,000 s") if cost.startswith("time/") else ("number", "thousands")
            unit = units[scale > 1]
            scaled = [(group, [(x / scale, p) for x, p in curve]) for group, curve in curves]
            label = f"{name} so far ({unit})"
            panels.append(_Panel(panel, label, "held-out accuracy (%)", True, scaled))
            rows += [
                (panel, cost, group.label, int(p.x), p.num, x, p.mean, p.low, p.high)
                for group in data.of_panel(panel)
                for x, p in cost_curve(group, cost, key)
            ]
    caption = (
        "Each point is an evaluation: its place across is the mean over the group's runs of the"
        " training cost until then, evaluation left out."
        f" {count_note(data.groups, is_accuracy=True)} {key}: {RunReader.meaning(key)}."
    )
    table = Table(
        ("panel", "cost", "group", "update", "n", "spent", "accuracy", "low", "high"), rows
    )
    return ReportFigure(title, caption, table, _draw(data, panels, len(costs)), notes)


def cost_curve(group: Group, cost: str, key: str) -> list[tuple[float, Point]]:
    """Returns for each evaluation that all runs of a group have reached the mean cost until then,
    and the accuracy."""
    records = [record for record in group.records if values_at(record.lines, key)]
    costs = [spent(record.lines, cost) for record in records]
    return [
        (statistics.fmean(one[int(point.x)] for one in costs), point)
        for point in accuracy_band(records, key)
    ]


def _draw(data: ReportData, panels: Sequence[_Panel], num_columns: int) -> Any:
    """Draws a grid: a row for each panel of the data, or, where each has one cell, three beside
    each other."""
    panels = [panel for panel in panels if any(curve for _, curve in panel.curves)]
    columns = num_columns if num_columns > 1 else min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = new_figure(rows, columns, (2.15 if columns > 1 else 2.9) * rows)
    for one in axes[len(panels) :]:
        one.set_axis_off()
    for one, panel in zip(axes, panels, strict=False):
        for group, curve in panel.curves:
            places, points = [x for x, _ in curve], [point for _, point in curve]
            if curve:
                look = looks(data.look(group.label))
                draw_band(one, places, points, printable(group.label, 40), look)
        # A longer title would run into that of the next panel.
        one.set_title(printable(panel.title, 78 // columns))
        one.set_xlabel(panel.x_label)
        one.set_ylabel(panel.y_label)
        if panel.x_label == "update":
            whole_updates(one)
        if panel.is_share:
            as_percent(one.yaxis)
            one.set_ylim(-0.02, 1.02)
        else:
            fit_y(one, [point for _, curve in panel.curves for _, point in curve])
    add_legend(figure, axes)
    return figure
