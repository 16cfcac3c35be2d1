"""Parts that figures share: bands, labels at the ends of lines, bars with their values, panels side
by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from treegraft.view.report.bands import Point
from treegraft.view.report.groups import Group
from treegraft.view.report.shape import INTERVAL_SEEDS, INTERVAL_TASKS, brief
from treegraft.view.report.style import COLOURS, HATCHES, MOST_LINES, printable, tint

_MOST_DIRECT, _LONGEST_DIRECT = 4, 22
_NUM_MARKERS = 8


@dataclass(frozen=True, slots=True)
class Scene:
    """What all figures of a report are made of."""

    groups: Sequence[Group]
    accuracy: str | None
    """Key of the accuracy that most runs recorded; None: none did."""
    baseline: str | None
    """Label of the group that others are compared with; None: nothing is."""
    encoder: str
    """What turns trajectories into vectors."""

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
        """Returns the labels that get a curve and a colour of their own, in order: no more than can
        be told apart.

        Where there are more, those with most runs in a panel come first.
        """
        runs: dict[str, int] = {}
        for group in self.groups:
            runs[group.label] = max(runs.get(group.label, 0), len(group.records))
        chosen = sorted(runs, key=lambda label: -runs[label])[:MOST_LINES]
        return [label for label in runs if label in chosen]

    def look(self, label: str) -> int | None:
        """Returns the number of a label's look, the same in all figures; None for one that is not
        drawn as a curve."""
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


def how_many(groups: Sequence[Group], *, is_accuracy: bool = False) -> str:
    """Returns the sentences on n and intervals for a caption."""
    counts = sorted({len(group.records) for group in groups})
    span = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    if counts[-1] > 1:
        said = (
            f"n = {span} runs with other seeds; bands and whiskers: {INTERVAL_SEEDS}, cut at the"
            " panels' edges."
        )
        return said + (f" Where n = 1: {INTERVAL_TASKS}." if is_accuracy and counts[0] == 1 else "")
    return f"n = 1 run each. Bands and whiskers: {INTERVAL_TASKS}; what other seeds would give is not known." if is_accuracy else (
        "n = 1 run each: no interval, what other seeds would give is not known."
    )  # fmt: skip


def draw_band(
    axes: Any,
    points: Sequence[Point],
    label: str,
    look: Mapping[str, Any],
    x: Sequence[float] | None = None,
) -> None:
    """Draws a mean with its interval; `x` in place of the points' own."""
    places = [point.x for point in points] if x is None else list(x)
    every = max(1, len(points) // _NUM_MARKERS)
    axes.plot(places, [point.mean for point in points], label=label, markevery=every, **look)
    low = [point.mean if point.low is None else point.low for point in points]
    high = [point.mean if point.high is None else point.high for point in points]
    if any(point.low is not None for point in points):
        axes.fill_between(places, low, high, color=look["color"], alpha=0.15, linewidth=0)


def fit_y(axes: Any, points: Sequence[Point]) -> None:
    """Sets a panel's height by the runs themselves, with 0 in it: intervals of few runs are wide,
    and would flatten the curves."""
    if points:
        low, high = (
            min(0.0, *(one.least for one in points)),
            max(0.0, *(one.most for one in points)),
        )
        room = 0.05 * ((high - low) or 1.0)
        axes.set_ylim(low - (room if low < 0 else 0.0), high + room)


def fits_direct(labels: Sequence[str]) -> bool:
    """Returns whether these labels can stand at the ends of their lines."""
    return len(labels) <= _MOST_DIRECT and all(len(label) <= _LONGEST_DIRECT for label in labels)


def label_ends(axes: Any, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Writes labels to the right of a panel at the ends of their lines, moved apart where they
    would meet.

    Args:
        ends: (x, y, label, colour) of each line's last point.
    """
    low, high = axes.get_ylim()
    height = axes.get_window_extent().height / axes.figure.dpi * 72
    gap = 9.5 / max(height, 1.0)
    wanted = sorted(
        (((y - low) / (high - low)), x, y, label, colour) for x, y, label, colour in ends
    )
    places = [place for place, *_ in wanted]
    for n in range(1, len(places)):
        places[n] = max(places[n], places[n - 1] + gap)
    over = max(0.0, places[-1] - 1.0) if places else 0.0
    for n in range(len(places) - 1, -1, -1):
        most = places[-1] - over if n == len(places) - 1 else places[n + 1] - gap
        places[n] = min(places[n], most)
    for place, (_, x, y, label, colour) in zip(places, wanted, strict=True):
        axes.annotate(
            label,
            xy=(x, y),
            xytext=(1.04, place),
            textcoords="axes fraction",
            color=colour,
            va="center",
            fontweight="bold",
            fontsize=7.5,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.6,
                "shrinkA": 1,
                "shrinkB": 3,
            },
        )


def as_percent(axes: Any, which: str = "y") -> None:
    """Shows an axis' shares as per cent; its label says so."""
    from matplotlib.ticker import PercentFormatter

    getattr(axes, f"{which}axis").set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=""))


def whole_updates(axes: Any) -> None:
    """Numbers an axis of updates with whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: Bar("GRPO", 0.5, 0.4, 0.6, (0.45, 0.55)); low and high None: no interval."""

    label: str
    value: float
    low: float | None
    high: float | None
    dots: Sequence[float] = ()
    """Single runs, drawn on the bar."""
    look: int | None = 0
    """Number of its colour and hatch; None: grey."""


def draw_bars(
    axes: Any,
    bars: Sequence[Bar],
    *,
    shows_names: bool,
    said: Callable[[float], str] = brief,
    most: float | None = None,
) -> None:
    """Draws horizontal bars of values from 0 on, the first on top, each with its whiskers, its runs
    as dots and its value.

    Args:
        most: largest value that there can be; whiskers are cut there, and at 0. None: cut at 0
            only.
    """
    top = math.inf if most is None else most
    bars = [
        (
            bar
            if bar.low is None or bar.high is None
            else replace(bar, low=max(0.0, bar.low), high=min(top, bar.high))
        )
        for bar in bars
    ]
    for place, bar in enumerate(bars):
        colour, hatch = (
            ("#8a8a8a", "")
            if bar.look is None
            else (COLOURS[bar.look % MOST_LINES], HATCHES[bar.look % MOST_LINES])
        )
        axes.barh(
            place,
            bar.value,
            height=0.68,
            facecolor=tint(colour),
            hatch=hatch,
            edgecolor=colour,
            linewidth=0.8,
        )
        if bar.low is not None and bar.high is not None:
            axes.errorbar(bar.value, place, xerr=[[bar.value - bar.low], [bar.high - bar.value]], color="black", capsize=2.5,
                          linewidth=0.9)  # fmt: skip
        if len(bar.dots) > 1:
            axes.plot(bar.dots, [place] * len(bar.dots), "o", color="white", markeredgecolor="black", markersize=2.6,
                      markeredgewidth=0.6, linestyle="none", zorder=3)  # fmt: skip
    reach = [
        max([bar.value, *([] if bar.high is None else [bar.high]), *bar.dots, 0.0]) for bar in bars
    ]
    span = max(max(reach), 1e-9)
    for place, (bar, end) in enumerate(zip(bars, reach, strict=True)):
        axes.text(end + 0.045 * span, place, said(bar.value), va="center", ha="left", fontsize=7.5)
    axes.set_xlim(0, 1.27 * span)
    axes.set_ylim(len(bars) - 0.45, -0.55)
    axes.set_yticks(
        range(len(bars)),
        [printable(bar.label, 26) for bar in bars] if shows_names else [""] * len(bars),
    )
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
