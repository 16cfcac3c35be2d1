"""The page: one HTML file with the figures in it, without scripts and without requests to the
network."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from treegraft.extras.lab.report.figure import Cell, MissingFigure, ReportFigure, Table, number
from treegraft.extras.lab.report.groups import Group, pooled_differences
from treegraft.extras.lab.report.summary import differences, summary
from treegraft.parts import plain

_MOST_ROWS = 400
"""Rows of a table on the page; its CSV has all of them."""
_STYLE = """
:root { color-scheme: light dark; --text: #1b1b1b; --page: #fff; --dim: #444; --line: #e6e6e6;
  --note: #7a3b00; --link: #0059a0; }
@media screen and (prefers-color-scheme: dark) {
  :root { --text: #e6e6e6; --page: #1a1a1a; --dim: #b4b4b4; --line: #3a3a3a; --note: #f0a860;
    --link: #7cbcf5; }
  /* White becomes the colour of the page; hues stay. */
  figure svg { filter: invert(0.9) hue-rotate(180deg); }
}
@media print { :root { color-scheme: light; } }
body { font: 16px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; color: var(--text);
  background: var(--page); margin: 0 auto; max-width: 62rem; padding: 1.5rem 1.5rem 4rem;
  overflow-wrap: anywhere; }
@media (min-width: 1800px) { body { font-size: 19px; } }
@media (min-width: 2400px) { body { font-size: 23px; } }
h1 { font-size: 1.7rem; margin: 0.4rem 0; }
h2 { font-size: 1.2rem; margin: 2.6rem 0 0.4rem; }
nav { font-size: 0.9rem; }
nav a { margin-right: 1rem; white-space: nowrap; }
figure { margin: 0; }
figure svg { width: 100%; height: auto; display: block; }
@media (max-width: 600px) {
  body { padding: 1rem 0.8rem 3rem; }
  figure { overflow-x: auto; }
  figure svg { min-width: 38rem; }
}
figcaption { font-size: 0.88rem; color: var(--dim); margin-top: 0.4rem; max-width: 52rem; }
.about { color: var(--dim); }
.note { color: var(--note); font-size: 0.88rem; margin: 0.2rem 0; }
table { border-collapse: collapse; font-size: 0.82rem; font-variant-numeric: tabular-nums;
  margin: 0.5rem 0; overflow-wrap: normal; }
th { text-align: left; border-bottom: 1.5px solid var(--text); white-space: nowrap; }
th.n { text-align: right; }
td, th { padding: 0.15rem 0.9rem 0.15rem 0; vertical-align: top; }
td { border-bottom: 1px solid var(--line); }
td.n, .summary td { white-space: nowrap; }
td.n { text-align: right; }
.scroll { overflow: auto; max-height: 26rem; }
details { margin: 0.4rem 0; }
summary { cursor: pointer; font-size: 0.88rem; }
a { color: var(--link); }
@media print { details, nav { display: none; } .scroll { max-height: none; } }
"""
_SUMMARY = (
    "Accuracy on the held-out tasks at the last evaluation, with its 95 % interval: over runs with"
    " other seeds (Student's t), of a single run over its tasks (Wilson). Calls, tokens and seconds"
    " are sums over a run; of several runs their mean. Time is by the clock, with warm-up and"
    " evaluations."
)
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action"
    " 'none'"
)


def page(
    groups: Sequence[Group],
    figures: Mapping[str, ReportFigure | MissingFigure],
    folder: Path,
    notes: Sequence[str],
    title: str,
    beside: Mapping[str, str],
) -> str:
    """Returns the page.

    Args:
        beside: titles of further pages by the file beside it.
        figures: by name.
        folder: holds the figures as `drawing.save` wrote them; links call it by its name.
    """
    drawn = {name: one for name, one in figures.items() if isinstance(one, ReportFigure)}
    missing = [one for one in figures.values() if isinstance(one, MissingFigure)]
    links = [f'<a href="#{name}">{_text(one.title)}</a>' for name, one in drawn.items()]
    links += [f'<a href="{name}">{_text(one)}</a>' for name, one in beside.items()]
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{_text(title)}</h1>",
        f"<nav>{' '.join(links)}</nav>",
        "<h2>Results</h2>",
        _table(summary(groups), "summary"),
        f'<p class="note"><span class="about">{_text(_SUMMARY)}</span></p>',
        *_notes(notes),
        *_settings(groups),
    ]
    for name, one in drawn.items():
        svg = (folder / f"{name}.svg").read_text(encoding="utf-8")
        files = [
            f'<a href="{folder.name}/{name}.{kind}">{kind.upper()}</a>'
            for kind in ("svg", "png", "csv")
        ]
        parts += [
            f'<section id="{name}"><h2>{_text(one.title)}</h2>',
            f"<figure>{inline(svg, name, one.title)}",
            f"<figcaption>{_text(one.caption)}</figcaption></figure>",
            *_notes(one.notes),
            f"<details><summary>The numbers ({len(one.table.rows):,} rows) · {' · '.join(files)}",
            f"</summary>{_table(one.table)}</details></section>",
        ]
    if missing:
        parts.append("<h2>Left out</h2><ul>")
        parts += [f"<li>{_text(one.title)}: {_text(one.reason)}</li>" for one in missing]
        parts.append("</ul>")
    parts += ["<h2>Runs</h2>", _table(_runs(groups))]
    return "\n".join([*parts, "</body></html>", ""])


def _settings(groups: Sequence[Group]) -> list[str]:
    found = differences(groups)
    if sum(len(group.records) for group in groups) < 2:
        return []
    if not found.rows:
        return ["<h2>Settings that differ</h2>", "<p>None but names and seeds.</p>"]
    return ["<h2>Settings that differ</h2>", _table(found)]


def _notes(notes: Sequence[str]) -> list[str]:
    return [f'<p class="note">{_text(note)}</p>' for note in notes]


def _text(text: str) -> str:
    """Foreign text as text: control characters visible, markup escaped, lone surrogates
    replaced."""
    return escape(plain(text).encode("utf-8", "replace").decode("utf-8"))


def inline(svg: str, name: str, title: str) -> str:
    """Returns an SVG file as part of a page: without its head, its ids made its own, with a name
    for screen readers."""
    # Figures number their ids alike, so two on one page would use each other's clip paths.
    body = svg[svg.index("<svg") :]
    body = re.sub(r'\bid="([^"]*)"', rf'id="{name}-\1"', body)
    body = re.sub(r'\b((?:xlink:)?href)="#', rf'\1="#{name}-', body)
    body = body.replace("url(#", f"url(#{name}-")
    return body.replace("<svg ", f'<svg role="img" aria-label="{_text(title)}" ', 1)


def _runs(groups: Sequence[Group]) -> Table:
    rows = [
        (
            group.panel,
            group.label,
            record.name,
            record.seed,
            record.state,
            int(record.lines[-1]["update"]) if record.lines else None,
            "; ".join(record.notes),
        )
        for group in groups
        for record in group.records
    ]
    columns = ("panel", "group", "run", "seed", "state", "last update", "remarks")
    return Table(columns, rows)


def _table(table: Table, name: str = "") -> str:
    # A column that is empty in all rows (panels of a report with one panel) is left out.
    told = [n for n, column in enumerate(zip(*table.rows, strict=True)) if {*column} - {None, ""}]
    heads = [
        '<th class="n">' if all(not isinstance(row[n], str) for row in table.rows) else "<th>"
        for n in told
    ]
    names = [_text(table.columns[n]) for n in told]
    head = "".join(f"{tag}{one}</th>" for tag, one in zip(heads, names, strict=True))
    rows = "".join(
        "<tr>" + "".join(_cell(row[n]) for n in told) + "</tr>" for row in table.rows[:_MOST_ROWS]
    )
    more = len(table.rows) - _MOST_ROWS
    note = f'<p class="note">{more:,} further rows stand in the CSV file.</p>' if more > 0 else ""
    head = f"<thead><tr>{head}</tr></thead>"
    return (
        f'<div class="scroll"><table class="{name}">{head}<tbody>{rows}</tbody></table></div>{note}'
    )


def _cell(value: Cell) -> str:
    if isinstance(value, str):
        return f"<td>{_text(value)}</td>"
    return f'<td class="n">{"" if value is None else number(value)}</td>'


def group_notes(groups: Sequence[Group]) -> list[str]:
    """Returns remarks on the groups: settings that differ within a label, seeds that come twice,
    unfinished runs."""
    found = []
    for group in groups:
        where = group.title
        if pooled := pooled_differences(group):
            more = f" and {len(pooled) - 4} more" if len(pooled) > 4 else ""
            found.append(
                f"{where}: its runs differ in {', '.join(pooled[:4])}{more} too; they are one group"
                " because of their label."
            )
        seeds = Counter(record.seed for record in group.records if record.seed is not None)
        if twice := sorted(seed for seed, count in seeds.items() if count > 1):
            found.append(
                f"{where}: seed {', '.join(map(str, twice))} comes more than once; such runs are"
                " not independent."
            )
        found += [
            f"{record.name} {record.state}."
            for record in group.records
            if record.state != "finished"
        ]
    return found
