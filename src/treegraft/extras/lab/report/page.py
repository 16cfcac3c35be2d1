"""The page of a report: one HTML file with the figures in it, without scripts and without requests
to the network."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import fmean

from treegraft.extras.lab.report.figures import FIGURES, Cell, Figure
from treegraft.extras.lab.report.groups import Group, differing, show
from treegraft.extras.lab.report.records import GREEDY, SAMPLED
from treegraft.extras.lab.study.results import CALLS, SECONDS, TOKENS
from treegraft.parts import plain

_MOST_ROWS = 400
"""Rows of a table on the page; its CSV has all of them."""
_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 62rem; padding: 1.5rem;
  overflow-wrap: anywhere; }
img { width: 100%; height: auto; }
figure { margin: 0; }
figcaption, .note, summary { font-size: 0.88rem; }
.note { color: #7a3b00; margin: 0.2rem 0; }
.scroll { overflow: auto; max-height: 26rem; }
table { border-collapse: collapse; font-size: 0.82rem; overflow-wrap: normal; }
td, th { border-bottom: 1px solid #e6e6e6; padding: 0.15rem 0.9rem 0.15rem 0; text-align: left; }
.n { text-align: right; white-space: nowrap; }
"""
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action"
    " 'none'"
)
_SUMMARY = (
    "Accuracy on the held-out tasks at the last evaluation, with its 95 % interval: over runs with"
    " other seeds (Student's t), of a single run over its tasks (Wilson). Calls, tokens and seconds"
    " are sums over a run; of several runs their mean."
)


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
        folder: holds the figures as files; links call it by its name.
    """
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{_text(title)}</h1>",
        _summary(groups),
        f"<p>{_text(_SUMMARY)}</p>",
        *(f'<p class="note">{_text(note)}</p>' for note in notes),
        _differences(groups),
    ]
    for name, one in figures.items():
        title = FIGURES[name][0]
        drawing = base64.b64encode((folder / f"{name}.svg").read_bytes()).decode()
        links = []
        for kind in ("svg", "png", "csv"):
            links.append(f'<a href="{folder.name}/{name}.{kind}">{kind.upper()}</a>')
        parts += [
            f'<h2 id="{name}">{_text(title)}</h2>',
            f'<figure><img alt="{_text(title)}" src="data:image/svg+xml;base64,{drawing}">',
            f"<figcaption>{_text(one.caption)}</figcaption></figure>",
            f"<details><summary>The numbers ({len(one.rows):,} rows) · {' · '.join(links)}",
            f"</summary>{_table(one.columns, one.rows)}</details>",
        ]
    if missing:
        parts.append("<h2>Left out</h2><ul>")
        parts += [f"<li>{_text(one)}</li>" for one in missing]
        parts.append("</ul>")
    return "\n".join([*parts, "</body></html>", ""])


def _summary(groups: Sequence[Group]) -> str:
    """A row for each group: its last held-out accuracies with their intervals, and the mean costs
    of its runs."""
    rows = []
    for one in groups:
        last = sorted({int(record.lines[-1]["update"]) for record in one.records if record.lines})
        updates = (
            " to ".join(str(end) for end in dict.fromkeys([last[0], last[-1]])) if last else ""
        )
        costs: list[Cell] = []
        for cost in (CALLS, TOKENS, SECONDS):
            sums = [sum(one.values(cost).values()) for one in one.records if one.values(cost)]
            costs.append(fmean(sums) if sums else None)
        accuracies = [_accuracy(one, GREEDY), _accuracy(one, SAMPLED)]
        rows.append((one.world, one.label, len(one.records), updates, *accuracies, *costs))
    columns = ["world", "group", "runs", "updates", "greedy", "sampled"]
    return _table([*columns, "tool calls", "sampled tokens", "processor s"], rows)


def _accuracy(group: Group, key: str) -> str | None:
    end = group.final(key)
    if end is None:
        return None
    interval = ""
    if end.interval is not None:
        interval = f" [{100 * end.interval[0]:.1f}, {100 * end.interval[1]:.1f}]"
    return f"{100 * end.mean:.1f} %{interval}"


def _differences(groups: Sequence[Group]) -> str:
    """A row for each setting that is not the same in all runs, a column for each group."""
    rows = []
    for name in differing([record for one in groups for record in one.records]):
        cells = []
        for one in groups:
            values = dict.fromkeys(
                show(record.settings[name]) if name in record.settings else "-"
                for record in one.records
            )
            cells.append("; ".join(values))
        rows.append((name, *cells))
    if not rows:
        return ""
    columns = ["setting", *(one.title for one in groups)]
    return f"<h2>Settings that differ</h2>{_table(columns, rows)}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    lines = ["<tr>" + "".join(f"<th>{_text(one)}</th>" for one in columns) + "</tr>"]
    lines += ["<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows[:_MOST_ROWS]]
    more = len(rows) - _MOST_ROWS
    note = f'<p class="note">{more:,} further rows stand in the CSV file.</p>' if more > 0 else ""
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>{note}'


def _cell(value: Cell) -> str:
    if isinstance(value, str):
        return f"<td>{_text(value)}</td>"
    return f'<td class="n">{"" if value is None else number(value)}</td>'


def number(value: float) -> str:
    """Returns a number as tables on the page show it, to 4 digits."""
    if not math.isfinite(value):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def _text(text: str) -> str:
    """Foreign text as text: control characters visible, markup escaped, lone surrogates
    replaced."""
    return escape(plain(text).encode("utf-8", "replace").decode("utf-8"))
