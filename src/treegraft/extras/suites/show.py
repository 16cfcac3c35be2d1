"""Tables of evaluations for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from treegraft.extras.suites.compare import Comparison
from treegraft.extras.suites.numbers import Interval, SetNumbers, SuiteNumbers
from treegraft.parts import commands, plain

MAX_ITEMS = 10
"""Items of each kind that are named; the JSON names all."""


def percent(value: float | None) -> str:
    """Returns a share for people: 41.3; "-" if there is none."""
    return "-" if value is None else f"{100 * value:.1f}"


def interval(value: Interval) -> str:
    """Returns a mean with its interval, in per cent: 41.3 [35.0, 47.5]"""
    return f"{percent(value.mean)} [{percent(value.low)}, {percent(value.high)}]"


def _print_table(
    console: Console, columns: Sequence[str], rows: Sequence[Sequence[Any]], **options: Any
) -> None:
    table = commands.table(*columns, title_justify="left", **options)
    for row in rows:
        # As texts: names of checkpoints and levels may hold rich's markup.
        table.add_row(*(Text(plain(str(cell))) for cell in row))
    console.print(table)


def print_report(report: SuiteNumbers, console: Console) -> None:
    """Prints the numbers of an evaluation: scores, how trajectories ended, what they cost, levels
    and notes."""
    is_greedy = report.temperature == 0
    how = "greedy" if is_greedy else f"{report.num_samples} at temperature {report.temperature:g}"
    judged = f", judged by {report.judge_model}" if report.judge_model else ""
    _print_scores(report, console, Text(f"{report.checkpoint}: {how}{judged}"))
    columns = ["", "completed", "truncated", "off format", "failed"]
    columns += ["score if completed", "calls", "tokens", "correct/call"]
    rows: list[list[Any]] = []
    levels: list[list[Any]] = []
    for one in report.sets:
        row = [one.name, one.num_completed, one.num_truncated, one.num_violations, one.num_failed]
        row += [percent(one.score_completed), f"{one.tool_calls_mean:.2f}"]
        row.append(f"{one.sampled_tokens_mean:.0f}")
        row.append("-" if one.correct_per_call is None else f"{one.correct_per_call:.3f}")
        rows.append(row)
        for level, found in one.levels.items():
            levels.append([one.name, level, found.num_items, interval(found.score)])
    _print_table(console, columns, rows)
    if levels:
        _print_table(console, ["", "level", "items", "score [95 %]"], levels, num_left=2)
    for one in report.sets:
        for note in _notes(one):
            console.print(Text(f"{one.name}: {note}", "dim"), soft_wrap=True)
    if not report.is_complete:
        text = "not all items are done; these are the numbers of those that are"
        console.print(Text(text, "bold"), soft_wrap=True)


def _print_scores(report: SuiteNumbers, console: Console, title: Text) -> None:
    # pass@1 is the score itself.
    ks = sorted({k for one in report.sets for k in one.pass_at if k > 1})
    columns = ["set", "by", "items", "score [95 %]", "em", "f1", "match"]
    columns += ["judge"] if report.judge_model else []
    columns += [f"pass@{k}" for k in ks]
    rows: list[list[Any]] = []
    for one in report.sets:
        shares: list[float | None] = [one.em, one.f1, one.match]
        shares += [one.judge] if report.judge_model else []
        shares += [one.pass_at.get(k) for k in ks]
        row = [one.name, one.measure, one.num_items, interval(one.score)]
        rows.append(row + [percent(share) for share in shares])
    for group, score in report.groups.items():
        rows.append([f"mean of {group}", "", "", interval(score)])
    if len(report.sets) > 1:
        rows.append(["mean", "", "", interval(report.mean)])
    _print_table(console, columns, rows, num_left=2, title=title)


def _notes(one: SetNumbers) -> Iterator[str]:
    yield from one.notes
    # Readers could take them for the agent's failures.
    if one.num_failed:
        yield (
            f"{one.num_failed} trajectories were lost to failures of ours and count as wrong; the"
            " same command runs them again"
        )
    if one.judge is not None:
        yield (f"judge and rule differ on {one.num_disagreements} of {one.num_judged} answers")
    if one.num_unparsed:
        yield f"{one.num_unparsed} replies of the judge were no verdict and count as not correct"


def print_comparison(found: Comparison, console: Console) -> None:
    """Prints two evaluations side by side, and the items that flipped."""
    columns = ["set", "by", "items", "before", "after", "gain [95 %]", "gained", "lost"]
    rows: list[list[Any]] = []
    for one in found.sets:
        row = [one.name, one.measure, one.num_items, percent(one.before), percent(one.after)]
        rows.append([*row, interval(one.gain), len(one.gained), len(one.lost)])
    if len(found.sets) > 1:
        rows.append(["mean", "", "", "", "", interval(found.gain)])
    title = Text(f"before: {found.before}\nafter:  {found.after}")
    _print_table(console, columns, rows, num_left=2, title=title)
    for one in found.sets:
        for kind, items in (("gained", one.gained), ("lost", one.lost)):
            if items:
                more = f" and {len(items) - MAX_ITEMS} more" if len(items) > MAX_ITEMS else ""
                text = f"{kind}: {', '.join(items[:MAX_ITEMS])}{more}"
                console.print(Text(text), soft_wrap=True)
    for note in found.notes:
        console.print(Text(note, "dim"), soft_wrap=True)
