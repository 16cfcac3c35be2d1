"""How figures look: fonts, colours that the colour-blind can tell apart, line styles and markers
that a grey print keeps apart."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from treegraft.core.text import plain

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
HATCHES = ("", "///", "\\\\\\", "xxx", "---", "|||", "+++")
MOST_LINES = len(COLOURS)
"""Groups that one panel can hold apart."""
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
    "hatch.linewidth": 0.5,
    # Names of runs are no mathematics.
    "text.parse_math": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "treegraft",
}
_PNG_DPI = 200


@contextmanager
def styled() -> Iterator[None]:
    """Makes figures within look like ours, without a display."""
    import matplotlib

    with warnings.catch_warnings(), matplotlib.rc_context(_RC):
        # A name in a script that the font does not have is drawn as boxes; the tables have it
        # whole.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def new_figure(
    rows: int, columns: int, height: float, *, top: float = 0.0, width: float = WIDTH
) -> tuple[Any, list[Any]]:
    """Returns a figure with its panels row by row, sizes in inches; `top`: kept free above for a
    legend."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height + top), layout="constrained")
    layout: Any = figure.get_layout_engine()
    layout.set(w_pad=0.06, h_pad=0.05, rect=(0, 0, 1, height / (height + top)))
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


def tint(colour: str) -> str:
    """Returns a colour half way to white, solid: hatches on it are seen in SVG too, where
    transparency would drown them."""
    parts = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
    return "#" + "".join(f"{(part + 255) // 2:02x}" for part in parts)


def looks(number: int) -> dict[str, Any]:
    """Returns colour, dashes and marker of the group of this number."""
    place = number % MOST_LINES
    return {"color": COLOURS[place], "linestyle": DASHES[place], "marker": MARKERS[place]}


def legend_above(figure: Any, axes: Sequence[Any]) -> None:
    """Draws one legend for all panels over them, each label once."""
    handles: dict[str, Any] = {}
    for one in axes:
        for handle, label in zip(*one.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    longest = max((max(len(part) for part in label.split("\n")) for label in handles), default=1)
    columns = max(1, min(len(handles), int(118 // (longest + 8))))
    figure.legend(
        handles.values(), handles.keys(), loc="upper center", bbox_to_anchor=(0.5, 1.0), ncols=columns, handlelength=3.2,
        columnspacing=1.6, borderaxespad=0.2,
    )  # fmt: skip


def legend_height(labels: Sequence[str]) -> float:
    """Returns the inches that `legend_above` takes for these labels."""
    longest = max((max(len(part) for part in label.split("\n")) for label in labels), default=1)
    columns = max(1, min(len(labels), int(118 // (longest + 8))))
    num_lines = sum(
        max(label.count("\n") + 1 for label in labels[start : start + columns])
        for start in range(0, len(labels), columns)
    )
    return 0.17 * num_lines + 0.1


def save(figure: Any, path: Path) -> None:
    """Writes `path`.svg and `path`.png, the same bytes for the same figure."""
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None, "Creator": None}, dpi=_PNG_DPI)
    figure.savefig(path.with_suffix(".png"), dpi=_PNG_DPI, metadata={"Software": None})


__all__ = [
    *("COLOURS", "DASHES", "HATCHES", "MARKERS", "MOST_LINES", "WIDTH"),
    *(
        "legend_above",
        "legend_height",
        "looks",
        "new_figure",
        "printable",
        "save",
        "styled",
        "tint",
    ),
]
