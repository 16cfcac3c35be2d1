"""What a figure is before it is written: drawing, caption and table, or the one line that says why
there is none."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Cell = str | float | int | None
INTERVAL_SEEDS = "95 % interval of the mean over runs with other seeds (Student's t)"
INTERVAL_TASKS = "95 % interval over held-out tasks (Wilson)"


@dataclass(frozen=True, slots=True)
class Table:
    """The numbers of a figure: Table(("group", "update"), (("GRPO", 1),)); None: there is none."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]

    def as_csv(self) -> str:
        """Returns it as CSV, numbers in full; texts that a spreadsheet would take for formulas get
        a quote in front."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.columns)
        for row in self.rows:
            writer.writerow(
                [
                    "" if cell is None else _safe(cell) if isinstance(cell, str) else cell
                    for cell in row
                ]
            )
        return out.getvalue()


def _safe(text: str) -> str:
    clean = text.encode("utf-8", "replace").decode("utf-8").replace("\x00", "")
    return f"'{clean}" if clean.startswith(("=", "+", "-", "@", "\t", "\r")) else clean


@dataclass(frozen=True, slots=True)
class Made:
    """A figure that the runs' data gave."""

    name: str
    """Of its files: "training-dynamics"."""
    title: str
    caption: str
    """What is shown, n, and how intervals were computed."""
    table: Table
    figure: Any
    """matplotlib's."""
    notes: Sequence[str] = ()
    """What was left out of it, and why."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A figure that the runs' data cannot give."""

    name: str
    title: str
    reason: str
    """One sentence."""


def number(value: float | None) -> str:
    """Returns a number as tables on the page show it, to 4 digits."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def brief(value: float) -> str:
    """Returns a number as it stands beside a bar, to 3 digits."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == 0 else f"{value:.3g}"
