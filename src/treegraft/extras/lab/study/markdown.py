"""Tables of a study's results in Markdown."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence

from treegraft.extras.lab.study.results import CALLS, SECONDS, SHOWN, TOKENS, changes, mixed_pairs
from treegraft.extras.lab.study.tables import NAMES, Question, Row, Runs, Test, mean_of, rows, tests
from treegraft.extras.lab.text import counted

SPREAD = 1.05
"""Ratio of calibrations from which a table says that they differ."""
LINE = 116
"""Characters of a line of text."""


def _interval(value: float, interval: tuple[float, float] | None) -> str:
    if interval is None:
        return f"{value:.2f}"
    return f"{value:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]"


def _share(values: Sequence[float | None]) -> str:
    """The mean where every run got there; else how many did, since a mean of these would be one of
    chosen pairs."""
    if None in values:
        return f"- ({sum(value is not None for value in values)} of {len(values)})"
    return f"{mean_of(values):.2f}"


def _table(header: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *body]
    return [f"| {' | '.join(line)} |" for line in lines] + [""]


def markdown(runs: Runs, question: Question) -> str:
    """Returns all tables of a study, with what a reader has to know about its runs."""
    lines = list(_about(runs))
    for world in runs.worlds:
        found = rows(runs, world, question)
        lines += _heading(runs, world, found)
        if not found:
            continue
        baseline = question.baseline_of([row.arm for row in found])
        names = list(found[0].at)
        shown = list(found[0].pass_at)
        header = ["arm", "held out", "IQM", f"this arm minus {baseline}", "P(better)"]
        header += [
            key.removeprefix("eval/").replace("_at_", "@").replace("_", " ") for key in shown
        ]
        lines += _table(
            [*header, *names],
            [
                [
                    _named(found, row),
                    _interval(row.mean, row.interval),
                    f"{row.iqm:.2f}",
                    _gain(baseline, row),
                    "" if row.arm == baseline else f"{row.better:.2f}",
                    *(f"{row.pass_at.get(key, 0.0):.2f}" for key in shown),
                    *(_share(row.at[name]) for name in names),
                ]
                for row in found
            ],
        )
        lines += _costs(found)
        for primary in question.primary:
            lines += _tests(tests(runs, world, question, primary), primary)
    return "\n".join(lines)


def brief(runs: Runs, question: Question, *, with_baseline: bool = False) -> str:
    """Returns one table a world, of six columns: accuracy at the first budget of calls, best first,
    what the world's first primary arm has more there (p after Holm), accuracy at the end, how many
    pairs left the start, and calls, with "+" those of the buffer's attempts; with what a reader has
    to know about its runs.

    Args:
        with_baseline: also the difference to the baseline at the end, as without a primary arm.
    """
    lines = list(_about(runs))
    for world in runs.worlds:
        found = rows(runs, world, question)
        lines += _heading(runs, world, found)
        if found:
            made = {one: tests(runs, world, question, one) for one in question.primary}
            lines += _brief(found, question, made, with_baseline or not question.primary)
    return "\n".join(lines)


def _heading(runs: Runs, world: str, found: Sequence[Row]) -> list[str]:
    """A world's name and pairs, those that are left out, and those that are none."""
    missing = list(runs.missing(world))
    said = "Pairs that are not there: " + ". ".join(missing) + "."
    left_out = [*textwrap.wrap(said, LINE, break_on_hyphens=False), ""] if missing else []
    if not found:
        return [f"**{world}**: no pair is complete for all arms yet.", "", *left_out]
    pairs = counted(len(found[0].last), "pair")
    return [f"**{world}**, {pairs}", "", *left_out, *_mixed(runs, world)]


def _mixed(runs: Runs, world: str) -> list[str]:
    """A paragraph on pairs that are none."""
    pairs = mixed_pairs(line for arm in runs.arms(world) for line in runs.of(world, arm))
    if not pairs:
        return []
    named = ", ".join(map(str, pairs))
    return [
        f"Not all arms began with the same weights in pairs {named}: their warm-ups were trained on"
        " different machines. Differences between arms are less exact than those of true pairs.",
        "",
    ]


def _brief(
    found: Sequence[Row],
    question: Question,
    made: Mapping[str, Sequence[Test]],
    with_baseline: bool,
) -> list[str]:
    baseline = question.baseline_of([row.arm for row in found])
    calls = next((name for name in found[0].at if name.endswith(f" {NAMES[CALLS]}")), None)
    columns: dict[str, Callable[[Row], str]] = {"arm": functools.partial(_named, found)}
    if calls is not None:
        # Those that got there first, by what they had there; then the others, by their ends.
        found = sorted(
            found,
            key=lambda row: (
                None in row.at[calls],
                -(row.mean if None in row.at[calls] else mean_of(row.at[calls]) or 0.0),
            ),
        )
        columns[calls] = lambda row: _share(row.at[calls])
        # The first primary arm that has runs in this world.
        for primary, own in [(one, own) for one, own in made.items() if own][:1]:
            there = {one.other: one for one in own if one.column == calls}
            columns[f"{primary} minus this arm"] = functools.partial(_difference, there)
    columns["at the end"] = lambda row: _interval(row.mean, row.interval)
    if with_baseline:
        columns[f"this arm minus {baseline} at the end"] = functools.partial(_gain, baseline)
    columns["left the start, after calls"] = _left
    columns["calls"] = _all_calls
    return _table(list(columns), [[cell(row) for cell in columns.values()] for row in found])


def _all_calls(row: Row) -> str:
    """The executed calls, and those of the buffer's attempts."""
    own = _total(row, cost=CALLS, form=",.0f")
    return f"{own} + {row.buffer_calls:,.0f}" if row.buffer_calls else own


def _named(found: Sequence[Row], row: Row) -> str:
    """An arm's name, with its development runs where another arm had more."""
    own, most = (max(one.tuning.get("runs", 0) for one in some) for some in ([row], found))
    return row.arm if own == most else f"{row.arm} ({own:.0f} of {most:.0f} tuning runs)"


def _gain(baseline: str, row: Row) -> str:
    return "" if row.arm == baseline else _interval(row.gain, row.gain_interval)


def _left(row: Row) -> str:
    after = "" if row.left_after is None else f", {row.left_after:,.0f}"
    return f"{row.num_left} of {len(row.last)}{after}"


def _difference(made: Mapping[str, Test], row: Row) -> str:
    one = made.get(row.arm)
    if one is None:
        return ""
    short = f" (at {one.place:,.0f})" if one.num_short else ""
    return f"{_interval(one.difference, one.interval)}, p {one.p_holm:.3f}{short}"


def _costs(found: Sequence[Row]) -> list[str]:
    names = list(found[0].at)
    columns: dict[str, Callable[[Row], str]] = {
        title: functools.partial(_total, cost=cost, form=form)
        for title, cost, form in (
            ("calls", CALLS, ",.0f"),
            ("shown calls", SHOWN, ",.0f"),
            ("tokens", TOKENS, ",.0f"),
            (_seconds_title(found), SECONDS, ",.1f"),
        )
        if any(cost in row.totals for row in found)
    }
    if any(row.buffer_calls or row.buffer_cpu_s for row in found):
        columns["buffer's attempts"] = lambda row: f"{row.buffer_attempts:,.0f}"
        columns["buffer's calls"] = lambda row: f"{row.buffer_calls:,.0f}"
        if any(row.buffer_cut for row in found):
            columns["steps cut"] = lambda row: f"{row.buffer_cut:,.0f}"
        columns["buffer's CPU s"] = lambda row: f"{row.buffer_cpu_s:,.1f}"
    if any(row.counts_warmup for row in found):
        columns["warm-up's CPU s"] = lambda row: f"{row.warmup_cpu_s:,.1f}"
    if any(row.tuning for row in found):
        columns["tuning calls"] = lambda row: f"{row.tuning.get('calls', 0.0):,.0f}"
        columns["tuning CPU s"] = lambda row: f"{row.tuning.get('cpu_s', 0.0):,.1f}"
    areas = [[_number(row.areas[name]) for name in names] for row in found]
    return _table(
        ["arm", *columns, *(f"area {name.removeprefix('at ')}" for name in names)],
        [
            [row.arm, *(cell(row) for cell in columns.values()), *own]
            for row, own in zip(found, areas, strict=True)
        ],
    )


def _seconds_title(found: Sequence[Row]) -> str:
    parts = ["buffer"] * any(row.buffer_cpu_s for row in found)
    parts += ["warm-up"] * any(row.counts_warmup for row in found)
    return f"CPU s, {' and '.join(parts)} included" if parts else "CPU s"


def _total(row: Row, *, cost: str, form: str) -> str:
    return format(row.totals[cost], form) if cost in row.totals else "-"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _tests(found: Sequence[Test], primary: str) -> list[str]:
    body = [
        [
            one.column,
            one.other,
            f"{one.num_pairs} (at {one.place:,.0f})" if one.num_short else str(one.num_pairs),
            _interval(one.difference, one.interval),
            f"{one.p:.4f}",
            f"{one.p_holm:.4f}",
        ]
        for one in found
    ]
    header = ["column", "other arm", "pairs", f"{primary} minus the other", "p", "p (Holm)"]
    return _table(header, body) if body else []


def _about(runs: Runs) -> Iterator[str]:
    lines = [
        line for world in runs.worlds for arm in runs.arms(world) for line in runs.of(world, arm)
    ]
    dates = sorted({line["date"] for line in lines if "date" in line})
    machines = sorted({str((line.get("machine") or {}).get("cpu", "")) for line in lines} - {""})
    commits = sorted({str(line["commit"])[:7] for line in lines if line.get("commit")})
    said = [" to ".join(dict.fromkeys((dates[0], dates[-1])))] if dates else []
    said += [", ".join(machines)] if machines else []
    said += (
        [f"commits {', '.join(commits)}" if len(commits) > 1 else f"commit {commits[0]}"]
        if commits
        else []
    )
    if any(line.get("is_dirty") for line in lines):
        said.append("with changes that are not committed")
    if said:
        yield ", ".join(said) + "."
    for change in changes(lines):
        yield f"{change}."
    if runs.calibrations and runs.calibrations[-1] > SPREAD * runs.calibrations[0]:
        yield (
            f"The calibration took {runs.calibrations[0]:.3f} to {runs.calibrations[-1]:.3f} CPU s"
            " beside the runs; their CPU seconds are scaled to its median."
        )
    if said:
        yield ""
