"""The page of a report: one HTML file with the figures in it, without scripts and without requests
to the network."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import jinja2

from treegraft.extras.lab.report.figures import FIGURES, Cell, Figure
from treegraft.extras.lab.report.groups import Group, differing, show
from treegraft.extras.lab.report.records import GREEDY, SAMPLED
from treegraft.extras.lab.study.results import CALLS, SECONDS, TOKENS
from treegraft.parts import plain


def page(
    title: str,
    groups: Sequence[Group],
    figures: Mapping[str, Figure],
    missing: Sequence[str],
    notes: Sequence[str],
    folder: Path,
) -> str:
    """Returns the page.

    Args:
        figures: by name.
        missing: a sentence for each figure that there is no data for.
        notes: remarks on the groups.
        folder: holds the figures as files.
    """
    shown = {}
    for name, one in figures.items():
        image = base64.b64encode((folder / f"{name}.svg").read_bytes()).decode()
        shown[name] = (FIGURES[name][0], one, image)
    environment = jinja2.Environment(autoescape=True, finalize=_clean)
    environment.filters["number"] = number
    source = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    return environment.from_string(source).render(
        title=title,
        summary=[_summary(one) for one in groups],
        notes=notes,
        titles=[one.title for one in groups],
        differences=_differences(groups),
        figures=shown,
        missing=missing,
    )


def _summary(one: Group) -> list[Cell]:
    """A group's last held-out accuracies with their intervals, and the mean costs of its runs."""
    last = sorted({int(record.lines[-1]["update"]) for record in one.records if record.lines})
    updates = " to ".join(dict.fromkeys([str(last[0]), str(last[-1])])) if last else ""
    row: list[Cell] = [one.world, one.label, len(one.records), updates]
    row += [_accuracy(one, GREEDY), _accuracy(one, SAMPLED)]
    for cost in (CALLS, TOKENS, SECONDS):
        sums = [sum(values.values()) for values in one.series(cost)]
        row.append(fmean(sums) if sums else None)
    return row


def _accuracy(group: Group, key: str) -> str | None:
    end = group.final(key)
    if end is None:
        return None
    interval = ""
    if end.interval is not None:
        interval = f" [{100 * end.interval[0]:.1f}, {100 * end.interval[1]:.1f}]"
    return f"{100 * end.mean:.1f} %{interval}"


def _differences(groups: Sequence[Group]) -> list[list[str]]:
    """A row for each setting that is not the same in all runs, a column for each group."""
    rows = []
    for name in differing([record for one in groups for record in one.records]):
        row = [name]
        for one in groups:
            values = []
            for record in one.records:
                values.append(show(record.settings[name]) if name in record.settings else "-")
            row.append("; ".join(dict.fromkeys(values)))
        rows.append(row)
    return rows


def number(value: float | None) -> str:
    """Returns a number as tables on the page show it, to 4 digits; "" for None."""
    if value is None:
        return ""
    is_long = abs(value) >= 10_000 or float(value).is_integer()
    return f"{value:,.0f}" if is_long else f"{value:.4g}"


def _clean(value: Any) -> Any:
    """Foreign text with control characters visible and lone surrogates replaced."""
    # Markup of our own macros is a subclass of text.
    if type(value) is str:
        return plain(value).encode("utf-8", "replace").decode("utf-8")
    return value
