"""Parts that figures share: fonts, colours that the colour-blind can tell apart, line styles and
markers that a grey print keeps apart, bands, legends."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from treegraft.extras.lab.report.bands import Point
from treegraft.extras.lab.report.groups import MOST_CURVES
from treegraft.parts import plain

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
"""Okabe & Ito, "Color universal design" (2008), without the yellow, which is faint on white."""
DASHES: Sequence[Any] = (
    "-",
    (0, (5, 1.5)),
    (0, (1.2, 1.2)),
    (0, (6, 1.5, 1.2, 1.5)),
    (0, (3, 1)),
    (0, (8, 2)),
    (0, (2, 2)),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
WIDTH = 7.0
"""Inches of a figure: the text width of a page."""
_RC: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.6,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "lines.markersize": 4,
    # Names of runs are no mathematics.
    "text.parse_math": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "treegraft",
}
_PNG_DPI = 200
_NUM_MARKERS = 8
"""Markers on a long curve."""


@contextmanager
def styled() -> Iterator[None]:
    """Gives the figures drawn within the report's style; needs no display."""
    import matplotlib

    with warnings.catch_warnings(), matplotlib.rc_context(_RC):
        # A name in a script that the font does not have is drawn as boxes; the tables have it
        # whole.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def new_figure(
    rows: int, columns: int, height: float, width: float = WIDTH
) -> tuple[Any, list[Any]]:
    """Returns a figure with its panels row by row, sizes in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def printable(text: str, width: int | None = None, lines: int = 3) -> str:
    """Returns foreign text as a figure can hold it: control characters visible, wrapped to `width`,
    cut after `lines` lines."""
    clean = plain(text).encode("utf-8", "replace").decode("utf-8").replace("\n", " ")
    if width is None:
        return clean
    wrapped = textwrap.wrap(clean, width) or [""]
    return "\n".join(
        [*wrapped[: lines - 1], wrapped[lines - 1] + " …"] if len(wrapped) > lines else wrapped
    )


def looks(number: int | None) -> dict[str, Any]:
    """Returns colour, dashes and marker of the group of this number; grey for None."""
    if number is None:
        return {"color": "#8a8a8a", "linestyle": "-", "marker": "o"}
    place = number % MOST_CURVES
    return {"color": COLOURS[place], "linestyle": DASHES[place], "marker": MARKERS[place]}


def add_legend(figure: Any, axes: Sequence[Any]) -> None:
    """Draws one legend for all panels above them, each label once, where there are several."""
    handles: dict[str, Any] = {}
    for one in axes:
        for handle, label in zip(*one.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if len(handles) < 2:
        return
    longest = max(len(part) for label in handles for part in label.split("\n"))
    columns = max(1, min(len(handles), 118 // (longest + 8)))
    figure.set_figheight(figure.get_figheight() + 0.17 * -(-len(handles) // columns))
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=columns)


def draw_band(
    axes: Any, places: Sequence[float], points: Sequence[Point], label: str, look: Mapping[str, Any]
) -> None:
    """Draws means with their intervals at places of the x axis."""
    every = max(1, len(points) // _NUM_MARKERS)
    axes.plot(places, [point.mean for point in points], label=label, markevery=every, **look)
    low = [point.mean if point.low is None else point.low for point in points]
    high = [point.mean if point.high is None else point.high for point in points]
    axes.fill_between(places, low, high, color=look["color"], alpha=0.15, linewidth=0)


def fit_y(axes: Any, points: Sequence[Point]) -> None:
    """Sets a panel's height by the runs themselves, with 0 in it: intervals of few runs are wide,
    and would flatten the curves."""
    low = min([0.0, *(one.least for one in points)])
    high = max([0.0, *(one.most for one in points)])
    room = 0.05 * ((high - low) or 1.0)
    axes.set_ylim(low - (room if low < 0 else 0.0), high + room)


def as_percent(axis: Any) -> None:
    """Shows an axis' shares as per cent; its label says so."""
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=""))


def whole_updates(axes: Any) -> None:
    """Numbers an axis of updates with whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, min_n_ticks=1))


def save(figure: Any, path: Path) -> None:
    """Writes `path`.svg and `path`.png, the same bytes for the same figure."""
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None, "Creator": None}, dpi=_PNG_DPI)
    figure.savefig(path.with_suffix(".png"), dpi=_PNG_DPI, metadata={"Software": None})
