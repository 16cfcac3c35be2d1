"""The papers' figures, drawn from a study's finished runs; what an update costs is printed.

    treegraft study studies/rapo-figure8.toml --lines > lines.jsonl
    python studies/figures/papers.py rapo-8 lines.jsonl [--baseline ARM] [--out FOLDER]

Writes NAME.svg, .png and .csv. The runs are those of small agents, not of the papers' models.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from treegraft.extras.lab.report.command import data_of, draw_figures
from treegraft.extras.lab.report.figures import (
    COLOURS,
    INTERVALS,
    MARKERS,
    Cell,
    Data,
    Figure,
    NoData,
    against_cost,
    final_accuracy,
    over_updates,
    panels_of,
    percent,
    printable,
)
from treegraft.extras.lab.report.groups import Group, Point, differing, frozen
from treegraft.extras.lab.report.records import records_of
from treegraft.extras.lab.study.results import CALLS, SECONDS, TOKENS, Line, read_results
from treegraft.extras.lab.text import table
from treegraft.parts import RunReader

PER_UPDATE: Mapping[str, str] = {
    "time/rollout_s": "rollout s",
    "time/learn_s": "learning s",
    SECONDS: "CPU s",
    CALLS: "calls",
    TOKENS: "tokens",
}
"""What an update costs, by the metric, with its column."""


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
    drawing, panels = panels_of(num_rows, num_columns, [2.5] * num_rows)
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
        percent(panel.yaxis)
        panel.set_ylim(-0.02, 1.05)
        panel.legend(fontsize=7)
    caption = (
        "Last evaluation of runs that differ in one numeric setting alone; a line is named by the"
        f" group of its smallest value. {INTERVALS} Lines join measured values; between two of"
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


def vary(groups: Sequence[Group], name: str) -> list[list[Group]]:
    """Returns sets of groups that differ in one setting and in nothing else, over all worlds.

    What differs within a group of one label (the warm-up that each seed began with, say) does not
    count; a group within which the setting itself differs is in no set.
    """
    pooled = {setting for one in groups for setting in differing(one.records)}
    sets: dict[str, dict[str, Group]] = {}
    for one in groups:
        settings = one.records[0].settings
        if name not in settings or name in differing(one.records):
            continue
        others = settings.keys() - {name, *pooled}
        rest = frozen({other: settings[other] for other in others})
        sets.setdefault(rest, {}).setdefault(frozen(settings[name]), one)
    return [list(found.values()) for found in sets.values() if len(found) > 1]


def costs(lines: Sequence[Line], baseline: str | None) -> list[list[str]]:
    """Returns what an update of each arm costs on average, over its runs in all worlds, and how
    often that is the baseline's: a row of headings, then one for each arm; "" if it was not
    recorded."""
    arms = list(dict.fromkeys(str(line["method"]) for line in lines))
    arms.sort(key=lambda arm: arm != baseline)
    rows = [["arm", *PER_UPDATE.values()]]
    for arm in arms:
        cells = [arm]
        for key in PER_UPDATE:
            value = _mean_of(arm, key, lines)
            base = _mean_of(baseline, key, lines)
            shown = "" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
            cells.append(f"{shown} ({value / base:.2f} x)" if value is not None and base else shown)
        rows.append(cells)
    return rows


def _mean_of(arm: str | None, key: str, lines: Sequence[Line]) -> float | None:
    values = [_per_update(line, key) for line in lines if line["method"] == arm]
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _per_update(line: Line, key: str) -> float | None:
    column = [one for one in (line.get("updates") or {}).get(key, ()) if one is not None]
    if column:
        return fmean(column)
    last = line["curve"][-1]
    return last[key] / last["update"] if key in last and last["update"] > 0 else None


class Paper(NamedTuple):
    """A figure or table of a paper."""

    title: str
    draw: Callable[[Data], Figure]
    has_costs: bool = False
    """Whether a table of what an update costs is printed."""


EFFICIENCY = partial(over_updates, keys=("time/rollout_s", "time/learn_s", CALLS, TOKENS))
PAPERS = {
    "rapo-3": Paper("RAPO, figure 3: efficiency", EFFICIENCY, has_costs=True),
    "rapo-ablations": Paper("RAPO, tables 3 to 5: ablations", final_accuracy),
    "rapo-8": Paper("RAPO, figure 8: m, a and N_hybrid", sweep),
    "rapo-10": Paper(
        "RAPO, figure 10: entropy and tokens", partial(over_updates, keys=("learn/entropy", TOKENS))
    ),
    "rapo-11": Paper("RAPO, figure 11: efficiency in detail", EFFICIENCY, has_costs=True),
    "arpo-7": Paper("ARPO, figure 7: tool calls", against_cost, has_costs=True),
    "arpo-8": Paper("ARPO, figure 8: beta, N and M", sweep),
}
"""By the paper and the number."""


def main(words: Sequence[str] | None = None) -> None:
    """Draws a figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=PAPERS)
    parser.add_argument("lines", type=Path, help="what `treegraft study STUDY --lines` has printed")
    parser.add_argument("--baseline", help="the arm that others are compared with")
    parser.add_argument("--out", type=Path, default=Path("runs/figures"))
    given = parser.parse_args(words)
    lines = read_results(given.lines)
    one = PAPERS[given.name]
    data = data_of(records_of(lines), given.baseline)
    drawn, missing = draw_figures(data, {given.name: one.draw}, given.out)
    print(f"{one.title}: {len(lines)} runs of small agents, not the paper's models")
    for name in drawn:
        print(f"{given.out / name}.svg, .png, .csv")
    for reason in missing:
        print(reason)
    if one.has_costs:
        head, *rows = costs(lines, given.baseline)
        print("\n".join(table(head, rows)))


if __name__ == "__main__":
    main()
