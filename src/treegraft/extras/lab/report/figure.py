"""A figure before it is written: drawing, caption and table, or the reason why there is none."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Cell = str | float | int | None


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
class ReportFigure:
    """A figure, drawn from runs that recorded its data."""

    title: str
    caption: str
    """What is shown, n, and how intervals were computed."""
    table: Table
    figure: Any
    """matplotlib's."""
    notes: Sequence[str] = ()
    """What was left out of it, and why."""


@dataclass(frozen=True, slots=True)
class MissingFigure:
    """A figure that the runs have no data for."""

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
