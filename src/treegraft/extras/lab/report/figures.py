"""The figures of a report, drawn with matplotlib, each with the table of its numbers."""

from __future__ import annotations

import itertools
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from treegraft.extras.lab.report.groups import Group, Point
from treegraft.extras.lab.study.results import CALLS, SECONDS, TOKENS
from treegraft.extras.statistics import student
from treegraft.parts import RunReader, plain

# Loaded where something is drawn: the extra `reports` brings it.
if TYPE_CHECKING:
    from matplotlib.axes import Axes

Cell = str | float | int | None
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
"""Okabe & Ito, "Color universal design" (2008), without the yellow, which is faint on white."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", ":", "-.")
STYLE: Any = {
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e3e3",
    "legend.frameon": False,
    "lines.markersize": 4,
    # Names of runs are no mathematics.
    "text.parse_math": False,
    "svg.fonttype": "none",
    # The same bytes for the same figure.
    "svg.hashsalt": "treegraft",
}
WIDTH = 7.0
"""Inches of a figure: the text width of a page."""
AXES = {
    "reward/mean": "mean reward",
    "learn/entropy": "entropy (nats per token)",
    "time/rollout_s": "rollouts (s)",
    "time/learn_s": "learning (s)",
    CALLS: "tool calls",
    TOKENS: "sampled tokens",
    SECONDS: "processor time (s)",
}
"""How axes name metrics."""
INTERVALS = (
    "Bands and whiskers: 95 % intervals, over runs with other seeds (Student's t), of one run's"
    " accuracy over its held-out tasks (Wilson)."
)


class NoData(Exception):
    """The runs have nothing that the figure could show."""


@dataclass(frozen=True, slots=True)
class Data:
    """What all figures of a report are drawn from."""

    groups: Sequence[Group]
    accuracy: str | None
    """Key of the accuracy that most runs recorded; None if none did."""
    baseline: str | None
    """Label of the group that others are compared with."""

    @property
    def worlds(self) -> list[str]:
        """The worlds, in order."""
        return list(dict.fromkeys(one.world for one in self.groups))

    def of(self, world: str) -> list[Group]:
        """Returns a world's groups."""
        return [one for one in self.groups if one.world == world]

    def has(self, key: str) -> bool:
        """Returns whether a run recorded this metric."""
        return any(one.series(key) for one in self.groups)

    def look(self, label: str) -> dict[str, Any]:
        """Returns colour, dashes and marker of a label, the same in all figures."""
        number = list(dict.fromkeys(one.label for one in self.groups)).index(label)
        dashes = DASHES[number // len(COLOURS) % len(DASHES)]
        place = number % len(COLOURS)
        return {"color": COLOURS[place], "marker": MARKERS[place], "linestyle": dashes}

    def evaluated(self) -> str:
        """Returns the key of the accuracy.

        Raises:
            NoData: no run was evaluated.
        """
        if self.accuracy is None:
            raise NoData("no run was evaluated.")
        return self.accuracy


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawn figure."""

    caption: str
    columns: Sequence[str]
    """Of its table of numbers."""
    rows: Sequence[tuple[Cell, ...]]
    drawing: Any
    """matplotlib's."""


def panels_of(num_rows: int, num_columns: int, heights: Sequence[float]) -> tuple[Any, list[Axes]]:
    """Returns an empty drawing and its panels, row by row, whose heights are in inches."""
    from matplotlib import figure

    drawing = figure.Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
    panels = drawing.subplots(
        num_rows, num_columns, squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    return drawing, list(panels.flat)


def printable(text: str, width: int = 40) -> str:
    """Returns foreign text as a figure can hold it: control characters visible, in lines of some
    length, three at most."""
    # matplotlib writes SVG in UTF-8, which half a surrogate pair has not.
    clean = plain(text).encode("utf-8", "replace").decode("utf-8").replace("\n", " ")
    return "\n".join(textwrap.wrap(clean, width)[:3])


def percent(axis: Any) -> None:
    """Labels an axis in per cent."""
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=""))


def _draw_curves(
    panel: Axes, curves: Sequence[tuple[Mapping[str, Any], str, Sequence[Point]]]
) -> None:
    """Means over the x axis with their intervals; each has a look and a label."""
    for look, label, points in curves:
        # Eight markers are enough to distinguish curves; one a point would hide them.
        every = max(1, len(points) // 8)
        places = [point.x for point in points]
        means = [point.mean for point in points]
        if points:
            panel.plot(places, means, label=printable(label), markevery=every, **look)
    # Intervals of few runs are wide, and would flatten the curves.
    limits = panel.get_ylim()
    for look, _, points in curves:
        low = []
        high = []
        for point in points:
            low.append(point.mean - point.whiskers[0])
            high.append(point.mean + point.whiskers[1])
        places = [point.x for point in points]
        panel.fill_between(places, low, high, color=look["color"], alpha=0.15, linewidth=0)
    panel.set_ylim(limits)


def _add_legend(drawing: Any, panels: Sequence[Axes]) -> None:
    """One legend for all panels above them, each label once."""
    handles: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    # One curve is named by the title.
    if len(handles) > 1:
        longest = max(map(len, handles))
        columns = max(1, min(len(handles), 118 // (min(longest, 40) + 8)))
        # Room for the lines of the legend, which would take it from the panels.
        drawing.set_figheight(drawing.get_figheight() + 0.17 * -(-len(handles) // columns))
        drawing.legend(handles.values(), handles, loc="outside upper center", ncols=columns)


# ---------------------------------------------------------------------- curves


def _grid(
    data: Data, keys: Sequence[str], points_of: Callable[[Group, str], list[Point]]
) -> tuple[Any, list[tuple[Axes, str]], list[tuple[Cell, ...]]]:
    """A drawing with a row of panels for each world and a column for each key; its panels with
    their keys, and the rows of its table."""
    drawing, panels = panels_of(len(data.worlds), len(keys), [2.15] * len(data.worlds))
    rows: list[tuple[Cell, ...]] = []
    keyed = []
    # In the order of `panels_of`: a row of panels for each world.
    for panel, (world, key) in zip(panels, itertools.product(data.worlds, keys), strict=True):
        keyed.append((panel, key))
        curves = []
        for one in data.of(world):
            points = points_of(one, key)
            curves.append((data.look(one.label), one.label, points))
            for p in points:
                rows.append((world, key, one.label, p.update, p.num, p.x, p.mean, *p.bounds))
        _draw_curves(panel, curves)
        panel.set_title(printable(world, 78 // len(keys)))
    _add_legend(drawing, panels)
    return drawing, keyed, rows


def _accuracy_axis(panel: Axes) -> None:
    panel.set_ylabel("held-out accuracy (%)")
    percent(panel.yaxis)
    panel.set_ylim(-0.02, 1.02)


def over_updates(data: Data, keys: Sequence[str]) -> Figure:
    """Returns metrics over updates, a column of panels each; those that no run recorded are left
    out."""
    absent: list[str] = []
    present: list[str] = []
    for key in keys:
        (present if data.has(key) else absent).append(key)
    if not present:
        raise NoData(f"no run has recorded {', '.join(absent)}.")
    drawing, panels, rows = _grid(
        data, present, lambda one, key: one.band(key, is_accuracy=key == data.accuracy)
    )
    for panel, key in panels:
        panel.set_xlabel("update")
        if key == data.accuracy:
            _accuracy_axis(panel)
        else:
            panel.set_ylabel(AXES[key])
    meanings = " ".join(f"{key}: {RunReader.meaning(key)}." for key in present)
    if absent:
        meanings += f" Left out, since not recorded: {', '.join(absent)}."
    caption = f"Means over the runs of a group, up to the update that all reached. {INTERVALS} "
    columns = ("panel", "metric", "group", "update", "n", "mean", "low", "high")
    # Their place is the update itself.
    rows = [(*row[:5], *row[6:]) for row in rows]
    return Figure(caption + meanings, columns, rows, drawing)


def dynamics(data: Data) -> Figure:
    """Returns reward, entropy and held-out accuracy over updates."""
    own = [data.accuracy] if data.accuracy else []
    return over_updates(data, ["reward/mean", "learn/entropy", *own])


def against_cost(data: Data) -> Figure:
    """Returns held-out accuracy against the tool calls, sampled tokens and processor time spent
    until then."""
    key = data.evaluated()
    costs = [cost for cost in (CALLS, TOKENS, SECONDS) if data.has(cost)]
    if not costs:
        raise NoData("no run has recorded tool calls, sampled tokens or processor time.")
    drawing, panels, rows = _grid(data, costs, lambda one, cost: cost_curve(one, cost, key))
    for panel, cost in panels:
        panel.set_xlabel(f"{AXES[cost]} so far")
        _accuracy_axis(panel)
    caption = (
        "Each point is an evaluation: its place across is the mean over the group's runs of the"
        f" training cost until then, evaluation left out. {INTERVALS}"
        f" {key}: {RunReader.meaning(key)}."
    )
    columns = ("panel", "cost", "group", "update", "n", "spent", "accuracy", "low", "high")
    return Figure(caption, columns, rows, drawing)


def cost_curve(group: Group, cost: str, key: str) -> list[Point]:
    """Returns the accuracy at each evaluation that all runs of a group have reached, against the
    mean cost until then; nothing for a method without this cost, such as imitation."""
    costs = []
    for record in group.records:
        # A run that was not evaluated has no part in the curve's accuracy either.
        if record.values(key):
            costs.append(record.spent(cost))
    found = []
    for point in group.band(key, is_accuracy=True):
        found.append(replace(point, x=statistics.fmean(one[point.update] for one in costs)))
    return found if found and found[-1].x > 0 else []


# ---------------------------------------------------------------------- ends


def final_accuracy(data: Data) -> Figure:
    """Returns the last evaluations and, with a baseline, the paired differences to it."""
    key = data.evaluated()
    num_columns = 2 if data.baseline else 1
    heights = [0.75 + 0.235 * len(data.of(world)) for world in data.worlds]
    drawing, panels = panels_of(len(data.worlds), num_columns, heights)
    rows: list[tuple[Cell, ...]] = []
    for number, world in enumerate(data.worlds):
        left, *right = panels[number * num_columns : (number + 1) * num_columns]
        base = next((one for one in data.of(world) if one.label == data.baseline), None)
        groups = [one for one in data.of(world) if one.series(key)]
        for place, one in enumerate(groups):
            bar = one.final(key)
            assert bar is not None, "it has the key"
            # The baseline less itself is 0 by construction.
            gains = one.gains(base, key) if base is not None and one is not base else []
            mean, interval = student(gains) if gains else (None, None)
            colour = data.look(one.label)["color"]
            whiskers = [[length] for length in bar.whiskers]
            left.barh(place, bar.mean, xerr=whiskers, color=colour, alpha=0.55, capsize=2.5)
            left.plot(one.ends(key), [place] * bar.num, "k.", markersize=3)
            left.text(1.05, place, f"{100 * bar.mean:.1f} %", va="center", fontsize=7.5)
            if right and mean is not None:
                whiskers = [[length] for length in Point(0, mean, interval, 0).whiskers]
                right[0].plot(gains, [place] * len(gains), "k.", markersize=3)
                right[0].errorbar(mean, place, xerr=whiskers, color=colour, marker="o", capsize=2.5)
            runs = " ".join(f"{value:.4g}" for value in one.ends(key))
            own = (world, one.label, bar.num, bar.mean, *bar.bounds, runs)
            rows.append((*own, len(gains), mean, *(interval or (None, None))))
        _finish_bars(left, right, world, [one.label for one in groups])
    caption = (
        f"The last evaluation of each run; dots are single runs. {INTERVALS}"
        f" {key}: {RunReader.meaning(key)}."
    )
    if data.baseline:
        caption += (
            f" Right: difference to {data.baseline} at the last update that both evaluated, paired"
            " by seed."
        )
    columns = ["panel", "group", "n", "mean", "low", "high", "runs", "pairs", "difference"]
    columns += ["difference low", "difference high"]
    return Figure(caption, columns, rows, drawing)


def _finish_bars(left: Axes, right: Sequence[Axes], world: str, labels: Sequence[str]) -> None:
    places = range(len(labels))
    left.set_title(printable(world))
    left.set_yticks(places, [printable(label, 26) for label in labels])
    # Room for the number to the right of the bar.
    left.set_xlim(0, 1.24)
    left.set_xticks([0, 0.25, 0.5, 0.75, 1])
    left.set_xlabel("held-out accuracy (%)")
    for panel in right:
        panel.axvline(0, color="black", linewidth=0.8, zorder=0)
        panel.set_yticks(places, [""] * len(labels))
        panel.set_xlabel("difference (percentage points)")
    for panel in (left, *right):
        percent(panel.xaxis)
        panel.set_ylim(len(labels) - 0.45, -0.55)


FIGURES: Mapping[str, Callable[[Data], Figure]] = {
    "training-dynamics": dynamics,
    "accuracy-against-cost": against_cost,
    "final-accuracy": final_accuracy,
}
"""Functions of figures by name, in their order."""
