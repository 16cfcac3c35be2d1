"""Where methods ended: accuracy at the end, differences to a baseline, and sweeps of settings."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from treegraft.extras.lab.report.bands import last_accuracy, paired, student, values_at, wilson
from treegraft.extras.lab.report.drawing import as_percent, looks, new_figure, printable
from treegraft.extras.lab.report.figure import Cell, MissingFigure, ReportFigure, Table, number
from treegraft.extras.lab.report.groups import Group, ReportData, count_note, source_settings, vary
from treegraft.parts import RunReader

SOURCE = "off-policy source"

_MOST_SWEEPS = 6
"""Settings whose sweeps are drawn; the table has all of them."""


@dataclass(frozen=True, slots=True)
class Bar:
    """The mean over a group's runs: Bar("GRPO", 0.5, 0.4, 0.6, (0.45, 0.55)); low and high None: no
    interval."""

    label: str
    value: float
    low: float | None
    high: float | None
    runs: Sequence[float] = ()
    """Values of single runs; empty where there is nothing to show."""

    @property
    def whiskers(self) -> tuple[float, float]:
        """Lengths below and above the mean; 0 without an interval."""
        if self.low is None or self.high is None:
            return 0.0, 0.0
        # Rounding may put the bound of a share of 0 or 1 a little beyond it.
        return max(0.0, self.value - self.low), max(0.0, self.high - self.value)


Sweep = tuple[str, list[tuple[float | str, Bar]]]
"""A line's label, and (value of the setting, accuracy) of its points."""


def final_bar(group: Group, key: str) -> Bar | None:
    """Returns a group's last value of an accuracy with its interval, None where no run was
    evaluated."""
    ends = [(record.num_eval, last_accuracy(record, key)) for record in group.records]
    found = [(num, value) for num, value in ends if value is not None]
    if not found:
        return None
    values = [value for _, value in found]
    mean, low, high = student(values)
    # One run says nothing of other seeds, but its tasks have an interval of their own.
    if len(found) == 1 and found[0][0]:
        low, high = wilson(mean, found[0][0])
    if low is not None and high is not None:
        low, high = max(0.0, low), min(1.0, high)
    return Bar(group.label, mean, low, high, values)


def final_accuracy(data: ReportData) -> ReportFigure | MissingFigure:
    """Returns bars of the last evaluations and, with a baseline, of the paired differences to it:
    the ablation figure."""
    title = "Held-out accuracy at the end"
    if data.baseline:
        title += f", and the difference to {data.baseline}"
    key = data.accuracy
    if key is None:
        return MissingFigure(title, "no run was evaluated.")
    panels = list[tuple[str, list[Bar], list[Bar]]]()
    rows, notes = list[tuple[Cell, ...]](), list[str]()
    for panel in data.panels:
        groups = data.of_panel(panel)
        base = next((group for group in groups if group.label == data.baseline), None)
        bars, gaps = list[Bar](), list[Bar]()
        for group in groups:
            bar = final_bar(group, key)
            if bar is None:
                notes.append(f"{group.label}: not evaluated.")
                continue
            has_pairs = base is not None and group is not base
            pairs = paired(group.records, base.records, key) if base and has_pairs else []
            gap = student(pairs) if pairs else (None, None, None)
            bars.append(bar)
            gaps.append(Bar(group.label, gap[0] or 0.0, gap[1], gap[2], pairs))
            runs = " ".join(number(value) for value in bar.runs)
            head = (panel, group.label, len(bar.runs), bar.value, bar.low, bar.high, runs)
            rows.append((*head, len(pairs), *gap))
            evaluated = [values_at(record.lines, key) for record in group.records]
            ends = sorted({max(values) for values in evaluated if values})
            if len(ends) > 1:
                notes.append(f"{group.label}: its runs end at updates {', '.join(map(str, ends))}.")
        if data.baseline and base is None:
            notes.append(f"Panel '{panel}' has no group {data.baseline}, so no differences.")
        if bars:
            panels.append((panel, bars, gaps if base is not None else []))
    caption = (
        f"The last evaluation of each run. {count_note(data.groups, is_accuracy=True)} Dots: single"
        f" runs; intervals are cut at 0 and 100 %. {key}: {RunReader.meaning(key)}."
    )
    if data.baseline:
        caption += (
            f" Right: difference to {data.baseline} in percentage points at the last update that"
            " both evaluated, paired by seed; n there is the number of shared seeds, in the table."
        )
    columns = (
        *("panel", "group", "n", "mean", "low", "high", "runs"),
        *("pairs", "difference", "difference low", "difference high"),
    )
    return ReportFigure(title, caption, Table(columns, rows), _draw_final(data, panels), notes)


def _draw_final(data: ReportData, panels: Sequence[tuple[str, list[Bar], list[Bar]]]) -> Any:
    """Bars with whiskers, single runs as dots; beside them the differences as points with whiskers
    about a line at 0, since bars would hide their sign."""
    columns = 2 if any(gap.runs for *_, gaps in panels for gap in gaps) else 1
    heights = [0.75 + 0.235 * len(bars) for _, bars, _ in panels]
    figure, axes = new_figure(len(panels), columns, sum(heights))
    axes[0].get_gridspec().set_height_ratios(heights)
    dots = {"linestyle": "none", "marker": "o", "color": "white", "markersize": 2.6}
    dots |= {"markeredgecolor": "black", "markeredgewidth": 0.6}
    for row, (panel, bars, gaps) in enumerate(panels):
        left, places = axes[row * columns], range(len(bars))
        colours = [looks(data.look(bar.label))["color"] for bar in bars]
        left.barh(
            places,
            [bar.value for bar in bars],
            xerr=list(zip(*(bar.whiskers for bar in bars), strict=True)),
            height=0.68,
            color=colours,
            alpha=0.55,
            capsize=2.5,
            error_kw={"linewidth": 0.9},
        )
        for place, bar in enumerate(bars):
            if len(bar.runs) > 1:
                left.plot(bar.runs, [place] * len(bar.runs), zorder=3, **dots)
            left.text(1.05, place, f"{100 * bar.value:.1f} %", va="center", fontsize=7.5)
        left.set_yticks(places, [printable(bar.label, 26) for bar in bars])
        left.set_xlim(0, 1.24)
        left.set_xticks([0, 0.25, 0.5, 0.75, 1])
        as_percent(left.xaxis)
        left.set_title(printable(panel, 44))
        left.set_xlabel("held-out accuracy (%)")
        pair = [left]
        if columns == 2:
            right = axes[row * columns + 1]
            pair.append(right)
            for place, (gap, colour) in enumerate(zip(gaps, colours, strict=False)):
                if gap.runs:
                    right.plot(gap.runs, [place] * len(gap.runs), **dots)
                    error = [[length] for length in gap.whiskers]
                    right.errorbar(
                        gap.value, place, xerr=error, color=colour, marker="o", capsize=2.5
                    )
                elif gap.label == data.baseline:
                    right.text(0, place, "baseline", ha="center", va="center", fontsize=7.5)
            right.axvline(0, color="black", linewidth=0.8, zorder=0)
            low, high = right.get_xlim()
            right.set_xlim(max(low, -1), min(high, 1))
            right.set_yticks(places, [""] * len(bars))
            as_percent(right.xaxis)
            right.set_xlabel("difference (percentage points)")
            if not any(gap.runs for gap in gaps):
                right.set_axis_off()
        for one in pair:
            one.set_ylim(len(bars) - 0.45, -0.55)
            one.tick_params(axis="y", length=0)
            one.grid(visible=False, axis="y")
    return figure


# ---------------------------------------------------------------------- sweeps


def _swept_value(group: Group, name: str, groups: Sequence[Group]) -> float | str | None:
    """Returns the number of a setting, or the agent that a group retrieves from; None for a flag or
    a text, and where a sweep of a number shows the same."""
    values = group.records[0].settings
    if name != SOURCE:
        value = values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return float(value)
    differing = [
        one
        for one in source_settings()
        if len({str(each.records[0].settings.get(one)) for each in groups}) > 1
    ]
    if differing != ["buffer.path"] and len(differing) < 2:
        return None
    flaws = [
        f"{one.rpartition('.')[2]} {values[one]}"
        for one in source_settings()
        if one != "buffer.path" and values.get(one)
    ]
    return ", ".join([str(values.get("buffer.path") or "expert"), *flaws])


def _swept(
    data: ReportData, key: str
) -> tuple[dict[str, list[Sweep]], list[tuple[Cell, ...]], list[Group]]:
    """Returns the sweeps of each setting by its name, their rows of the table, and the groups."""
    names = sorted({name for group in data.groups for name in group.records[0].settings})
    swept = dict[str, list[Sweep]]()
    rows = list[tuple[Cell, ...]]()
    involved = list[Group]()
    for name, settings in [*((name, (name,)) for name in names), (SOURCE, source_settings())]:
        for groups in vary(data.groups, settings):
            points = [
                (value, bar, group)
                for group in groups
                if (value := _swept_value(group, name, groups)) is not None
                and (bar := final_bar(group, key)) is not None
            ]
            points.sort(key=lambda point: point[0])
            if len(points) < 2:
                continue
            label = points[0][2].title
            swept.setdefault(name, []).append((label, [point[:2] for point in points]))
            involved += [group for *_, group in points]
            rows += [
                (name, label, value, group.label, len(bar.runs), bar.value, bar.low, bar.high)
                for value, bar, group in points
            ]
    return swept, rows, involved


def sweep(data: ReportData) -> ReportFigure | MissingFigure:
    """Returns the last accuracy against each numeric setting in which runs differ and are equal in
    all others, and against the agents whose steps they retrieve."""
    title, key = "Accuracy at the end against a setting", data.accuracy
    if key is None:
        return MissingFigure(title, "no run was evaluated.")
    swept, rows, involved = _swept(data, key)
    if not swept:
        return MissingFigure(
            title,
            "no two groups differ in one numeric setting, or in the off-policy source, alone.",
        )
    drawn = list(swept.items())[:_MOST_SWEEPS]
    columns = min(3, len(drawn))
    num_rows = -(-len(drawn) // columns)
    figure, axes = new_figure(num_rows, columns, 2.5 * num_rows, width=2.4 + 1.6 * columns)
    for one in axes[len(drawn) :]:
        one.set_axis_off()
    for one, (name, lines) in zip(axes, drawn, strict=False):
        # Agents stand side by side; between two of them there is nothing that a line could mean.
        agents = list(dict.fromkeys(value for _, line in lines for value, _ in line))
        for place, (label, line) in enumerate(lines):
            shift = 0.08 * (place - (len(lines) - 1) / 2)
            one.errorbar(
                [agents.index(value) + shift if name == SOURCE else value for value, _ in line],
                [bar.value for _, bar in line],
                yerr=list(zip(*(bar.whiskers for _, bar in line), strict=True)),
                capsize=3,
                label=printable(label, 40),
                **looks(place) | ({"linestyle": "none"} if name == SOURCE else {}),
            )
        one.set_xlabel(name)
        one.set_ylabel("held-out accuracy (%)")
        as_percent(one.yaxis)
        one.set_ylim(-0.02, 1.05)
        one.legend(fontsize=7)
        if name == SOURCE:
            shown = [textwrap.fill(printable(str(agent), 44), 22) for agent in agents]
            slanted = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"}
            one.set_xticks(range(len(agents)), shown, fontsize=6, **slanted)
            one.margins(x=0.3)
    left = ", ".join(list(swept)[_MOST_SWEEPS:])
    caption = (
        "Last evaluation of runs that differ in one numeric setting, or in the agent whose steps"
        " they retrieve, alone; a line is named by the group of its smallest value."
        f" {count_note(involved, is_accuracy=True)} Lines join"
        " measured values; between two of them nothing was measured."
        f" {key}: {RunReader.meaning(key)}."
    )
    columns_of = ("setting", "method", "value", "group", "n", "mean", "low", "high")
    notes = [f"In the table only: {left}."] if left else []
    return ReportFigure(title, caption, Table(columns_of, rows), figure, notes)
