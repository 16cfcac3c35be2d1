"""The figures of a report, drawn with matplotlib, each with the table of its numbers."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from treegraft.extras.lab.report.groups import Group, Point, vary
from treegraft.extras.lab.statistics import student
from treegraft.extras.lab.study.results import CALLS, SECONDS, TOKENS
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
_INTERVALS = (
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


def _panels(num_rows: int, num_columns: int, heights: Sequence[float]) -> tuple[Any, list[Axes]]:
    from matplotlib import figure

    drawing = figure.Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
    panels = drawing.subplots(
        num_rows, num_columns, squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    return drawing, list(panels.flat)


def printable(text: str, width: int = 40) -> str:
    """Returns foreign text as a figure can hold it: control characters visible, in lines of some
    length, three at most."""
    clean = plain(text).encode("utf-8", "replace").decode("utf-8").replace("\n", " ")
    return "\n".join(textwrap.wrap(clean, width)[:3])


def _percent(axis: Any) -> None:
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=""))


def _draw_curves(
    panel: Axes, curves: Sequence[tuple[Mapping[str, Any], str, Sequence[Point]]]
) -> None:
    """Means over the x axis with their intervals; each has a look and a label."""
    for look, label, points in curves:
        every = max(1, len(points) // 8)
        places = [point.x for point in points]
        means = [point.mean for point in points]
        panel.plot(places, means, label=printable(label), markevery=every, **look)
    # Intervals of few runs are wide, and would flatten the curves.
    limits = panel.get_ylim()
    for look, _, points in curves:
        low = [point.mean - point.whiskers[0] for point in points]
        high = [point.mean + point.whiskers[1] for point in points]
        places = [point.x for point in points]
        panel.fill_between(places, low, high, color=look["color"], alpha=0.15, linewidth=0)
    panel.set_ylim(limits)


def _add_legend(drawing: Any, panels: Sequence[Axes]) -> None:
    """One legend for all panels above them, each label once."""
    handles: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if len(handles) > 1:
        longest = max(map(len, handles))
        columns = max(1, min(len(handles), 118 // (min(longest, 40) + 8)))
        drawing.set_figheight(drawing.get_figheight() + 0.17 * -(-len(handles) // columns))
        drawing.legend(handles.values(), handles, loc="outside upper center", ncols=columns)


# ---------------------------------------------------------------------- curves


def over_updates(data: Data, keys: Sequence[str]) -> Figure:
    """Returns metrics over updates, a column of panels each; those that no run recorded are left
    out."""
    absent = [key for key in keys if not any(one.has(key) for one in data.groups)]
    keys = [key for key in keys if key not in absent]
    if not keys:
        raise NoData(f"no run has recorded {', '.join(absent)}.")
    num_rows = len(data.worlds)
    drawing, panels = _panels(num_rows, len(keys), [2.15] * num_rows)
    rows: list[tuple[Cell, ...]] = []
    for number, panel in enumerate(panels):
        world = data.worlds[number // len(keys)]
        key = keys[number % len(keys)]
        is_accuracy = key == data.accuracy
        curves = []
        for one in data.of(world):
            points = one.band(key, is_accuracy=is_accuracy)
            curves.append((data.look(one.label), one.label, points))
            for p in points:
                rows.append((world, key, one.label, int(p.x), p.num, p.mean, *p.bounds))
        _draw_curves(panel, curves)
        panel.set_title(printable(world, 78 // len(keys)))
        panel.set_xlabel("update")
        panel.set_ylabel("held-out accuracy (%)" if is_accuracy else AXES[key])
        if is_accuracy:
            _percent(panel.yaxis)
            panel.set_ylim(-0.02, 1.02)
    _add_legend(drawing, panels)
    meanings = " ".join(f"{key}: {RunReader.meaning(key)}." for key in keys)
    caption = f"Means over the runs of a group, up to the update that all reached. {_INTERVALS} "
    if absent:
        meanings += f" Left out, since not recorded: {', '.join(absent)}."
    columns = ("panel", "metric", "group", "update", "n", "mean", "low", "high")
    return Figure(caption + meanings, columns, rows, drawing)


def dynamics(data: Data) -> Figure:
    """Returns reward, entropy and held-out accuracy over updates."""
    own = [data.accuracy] if data.accuracy else []
    return over_updates(data, ["reward/mean", "learn/entropy", *own])


def against_cost(data: Data) -> Figure:
    """Returns held-out accuracy against the tool calls, sampled tokens and processor time spent
    until then."""
    key = data.evaluated()
    costs = [cost for cost in (CALLS, TOKENS, SECONDS) if any(one.has(cost) for one in data.groups)]
    if not costs:
        raise NoData("no run has recorded tool calls, sampled tokens or processor time.")
    num_rows = len(data.worlds)
    drawing, panels = _panels(num_rows, len(costs), [2.15] * num_rows)
    rows: list[tuple[Cell, ...]] = []
    for number, panel in enumerate(panels):
        world = data.worlds[number // len(costs)]
        cost = costs[number % len(costs)]
        curves = []
        for one in data.of(world):
            placed = []
            for spent, p in cost_curve(one, cost, key):
                placed.append(Point(spent, p.mean, p.interval, p.num))
                rows.append((world, cost, one.label, int(p.x), p.num, spent, p.mean, *p.bounds))
            # A method without this cost, such as imitation without calls, has no curve.
            if placed and placed[-1].x > 0:
                curves.append((data.look(one.label), one.label, placed))
        _draw_curves(panel, curves)
        panel.set_title(printable(world, 26))
        panel.set_xlabel(f"{AXES[cost]} so far")
        panel.set_ylabel("held-out accuracy (%)")
        _percent(panel.yaxis)
        panel.set_ylim(-0.02, 1.02)
    _add_legend(drawing, panels)
    caption = (
        "Each point is an evaluation: its place across is the mean over the group's runs of the"
        f" training cost until then, evaluation left out. {_INTERVALS}"
        f" {key}: {RunReader.meaning(key)}."
    )
    columns = ("panel", "cost", "group", "update", "n", "spent", "accuracy", "low", "high")
    return Figure(caption, columns, rows, drawing)


def cost_curve(group: Group, cost: str, key: str) -> list[tuple[float, Point]]:
    """Returns for each evaluation that all runs of a group have reached the mean cost until then,
    and the accuracy."""
    costs = [record.spent(cost) for record in group.records if record.values(key)]
    found = []
    for point in group.band(key, is_accuracy=True):
        found.append((statistics.fmean(one[int(point.x)] for one in costs), point))
    return found


# ---------------------------------------------------------------------- ends


def final_accuracy(data: Data) -> Figure:
    """Returns the last evaluations and, with a baseline, the paired differences to it."""
    key = data.evaluated()
    num_columns = 2 if data.baseline else 1
    heights = [0.75 + 0.235 * len(data.of(world)) for world in data.worlds]
    drawing, panels = _panels(len(data.worlds), num_columns, heights)
    rows: list[tuple[Cell, ...]] = []
    for number, world in enumerate(data.worlds):
        left, *right = panels[number * num_columns : (number + 1) * num_columns]
        base = next((one for one in data.of(world) if one.label == data.baseline), None)
        groups = [one for one in data.of(world) if one.has(key)]
        for place, one in enumerate(groups):
            bar = one.final(key)
            assert bar is not None, "it has the key"
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
        f"The last evaluation of each run; dots are single runs. {_INTERVALS}"
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
    left.set_xlim(0, 1.24)
    left.set_xticks([0, 0.25, 0.5, 0.75, 1])
    left.set_xlabel("held-out accuracy (%)")
    for panel in right:
        panel.axvline(0, color="black", linewidth=0.8, zorder=0)
        panel.set_yticks(places, [""] * len(labels))
        panel.set_xlabel("difference (percentage points)")
    for panel in (left, *right):
        _percent(panel.xaxis)
        panel.set_ylim(len(labels) - 0.45, -0.55)


def sweep(data: Data) -> Figure:
    """Returns the last accuracy against each numeric setting in which runs differ and are equal in
    all others."""
    key = data.evaluated()
    swept: dict[str, list[tuple[str, list[Point]]]] = {}
    rows: list[tuple[Cell, ...]] = []
    for name in sorted({name for one in data.groups for name in one.records[0].settings}):
        for groups in vary(data.groups, name):
            points = sorted(_swept(groups, name, key), key=lambda found: found[1].x)
            if len(points) < 2:
                continue
            title = points[0][0].title
            swept.setdefault(name, []).append((title, [point for _, point in points]))
            for one, p in points:
                rows.append((name, title, p.x, one.label, p.num, p.mean, *p.bounds))
    if not swept:
        raise NoData("no two groups differ in one numeric setting alone.")
    num_columns = min(3, len(swept))
    num_rows = -(-len(swept) // num_columns)
    drawing, panels = _panels(num_rows, num_columns, [2.5] * num_rows)
    for panel in panels[len(swept) :]:
        panel.set_axis_off()
    for panel, (name, lines) in zip(panels, swept.items(), strict=False):
        for number, (title, line) in enumerate(lines):
            panel.errorbar(
                [point.x for point in line],
                [point.mean for point in line],
                yerr=list(zip(*(point.whiskers for point in line), strict=True)),
                capsize=3,
                label=printable(title),
                color=COLOURS[number % len(COLOURS)],
                marker=MARKERS[number % len(MARKERS)],
            )
        panel.set_xlabel(name)
        panel.set_ylabel("held-out accuracy (%)")
        _percent(panel.yaxis)
        panel.set_ylim(-0.02, 1.05)
        panel.legend(fontsize=7)
    caption = (
        "Last evaluation of runs that differ in one numeric setting alone; a line is named by the"
        f" group of its smallest value. {_INTERVALS} Lines join measured values; between two of"
        f" them nothing was measured. {key}: {RunReader.meaning(key)}."
    )
    columns = ("setting", "method", "value", "group", "n", "mean", "low", "high")
    return Figure(caption, columns, rows, drawing)


def _swept(groups: Sequence[Group], name: str, key: str) -> Iterator[tuple[Group, Point]]:
    """The groups whose value is a number, with their accuracies at it."""
    for one in groups:
        value = one.records[0].settings[name]
        final = one.final(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and final is not None:
            yield one, Point(float(value), final.mean, final.interval, final.num)


EFFICIENCY = ("time/rollout_s", "time/learn_s", CALLS, TOKENS)
"""RAPO, arXiv 2603.03078, figures 3 and 11."""
FIGURES: Mapping[str, tuple[str, Callable[[Data], Figure]]] = {
    "training-dynamics": ("Training dynamics", dynamics),
    "efficiency": ("Efficiency", partial(over_updates, keys=EFFICIENCY)),
    "entropy-and-tokens": (
        "Entropy and tokens",
        partial(over_updates, keys=("learn/entropy", TOKENS)),
    ),
    "accuracy-against-cost": ("Accuracy against its cost", against_cost),
    "final-accuracy": ("Held-out accuracy at the end", final_accuracy),
    "sweep": ("Accuracy at the end against a setting", sweep),
}
"""Titles and functions of figures by name, in the order of the page."""
