"""Tables of evaluations for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from treegraft.extras.suites.numbers import SetNumbers, SuiteNumbers
from treegraft.extras.suites.scores import Interval
from treegraft.extras.suites.versus import Comparison
from treegraft.parts import plain

MAX_FLIPS = 10
"""Items of each kind that a table names; the JSON names all."""


def percent(value: float | None) -> str:
    """Returns a share for people: 41.3; "-" where there is none."""
    return "-" if value is None else f"{100 * value:.1f}"


def interval(value: Interval) -> str:
    """Returns a mean with its interval, in per cent: 41.3 [35.0, 47.5]"""
    return f"{percent(value.mean)} [{percent(value.low)}, {percent(value.high)}]"


def _table(title: str, columns: Sequence[str], num_left: int = 1) -> Table:
    table = Table(
        title=Text(title), title_justify="left", box=None, padding=(0, 1), header_style="dim"
    )
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number < num_left else "right", no_wrap=number > 0)
    return table


def print_report(report: SuiteNumbers, console: Console) -> None:
    """Prints the numbers of an evaluation: scores, how trajectories ended, what they cost, levels
    and notes."""
    is_greedy = report.temperature == 0
    how = "greedy" if is_greedy else f"{report.num_samples} at temperature {report.temperature:g}"
    judged = f", judged by {report.judge_model}" if report.judge_model else ""
    console.print(_scores(report, f"{report.checkpoint}: {how}{judged}"))
    console.print(_ends(report))
    if any(one.pass_within and one.num_samples > 1 for one in report.sets):
        console.print(_within(report))
    if any(one.levels for one in report.sets):
        levels = _table("", ["", "level", "items", "score [95 %]"], 2)
        for one in report.sets:
            for level, found in one.levels.items():
                items, score = str(found.num_items), interval(found.score)
                levels.add_row(one.name, Text(plain(level)), items, score)
        console.print(levels)
    for one in report.sets:
        for note in _notes(one):
            console.print(Text(f"{one.name}: {note}", "dim"), soft_wrap=True)
    if not report.is_complete:
        text = "not all items are done; these are the numbers of those that are"
        console.print(Text(text, "bold"), soft_wrap=True)


def _scores(report: SuiteNumbers, title: str) -> Table:
    # pass@1 is the score itself.
    ks = sorted({k for one in report.sets for k in one.pass_at if k > 1})
    has_judge = report.judge_model is not None
    columns = ["set", "by", "items", "score [95 %]", "em", "f1", "match"]
    columns += ["judge"] if has_judge else []
    table = _table(title, [*columns, *(f"pass@{k}" for k in ks)], 2)
    for one in report.sets:
        judge = [one.judge] if has_judge else []
        passed = (one.pass_at.get(k) for k in ks)
        shares = map(percent, (one.em, one.f1, one.match, *judge, *passed))
        table.add_row(one.name, one.measure, str(one.num_items), interval(one.score), *shares)
    for group, score in report.groups.items():
        table.add_row(Text(f"mean of {group}"), "", "", Text(interval(score)))
    if len(report.sets) > 1:
        table.add_row(Text("mean", "bold"), "", "", Text(interval(report.mean), "bold"))
    return table


def _within(report: SuiteNumbers) -> Table:
    """The shares with all samples, a column for each number of calls."""
    limits = sorted({most for one in report.sets for most in one.pass_within})
    table = _table("", ["right within T calls", "k", *(f"T = {most}" for most in limits)])
    for one in report.sets:
        k = max(one.pass_at)
        shares = (one.pass_within.get(most, {}).get(k) for most in limits)
        table.add_row(one.name, str(k), *map(percent, shares))
    return table


def _ends(report: SuiteNumbers) -> Table:
    columns = ["", "completed", "truncated", "off format", "failed"]
    columns += ["score if completed", "calls", "tokens", "correct/call"]
    table = _table("", columns)
    for one in report.sets:
        per_call = "-" if one.correct_per_call is None else f"{one.correct_per_call:.3f}"
        ends = (one.num_completed, one.num_truncated, one.num_violations, one.num_failed)
        cost = [f"{one.tool_calls_mean:.2f}", f"{one.sampled_tokens_mean:.0f}", per_call]
        table.add_row(one.name, *map(str, ends), percent(one.score_completed), *cost)
    return table


def _notes(one: SetNumbers) -> Iterator[str]:
    yield from one.notes
    if one.num_failed:
        yield (
            f"{one.num_failed} trajectories were lost to failures of ours and count as wrong; the"
            " same command runs them again"
        )
    if one.judge is not None:
        yield (
            f"judge and rule differ on {one.judge_yes_rule_no + one.judge_no_rule_yes} of"
            f" {one.num_judged} answers ({one.judge_yes_rule_no} right by the judge alone,"
            f" {one.judge_no_rule_yes} by the rule alone)"
        )
    if one.num_unparsed:
        yield f"{one.num_unparsed} replies of the judge were no verdict and count as not correct"


def print_comparison(found: Comparison, console: Console) -> None:
    """Prints two evaluations side by side, and the items that flipped."""
    columns = ["set", "by", "items", "before", "after", "gain [95 %]", "gained", "lost"]
    table = _table(f"before: {found.before}\nafter:  {found.after}", columns, 2)
    for one in found.sets:
        shares = [percent(one.before), percent(one.after), interval(one.gain)]
        counts = map(str, (len(one.gained), len(one.lost)))
        table.add_row(one.name, one.measure, str(one.num_items), *shares, *counts)
    if len(found.sets) > 1:
        table.add_row("mean", "", "", "", "", interval(found.gain))
    console.print(table)
    for one in found.sets:
        for kind, flips in (("gained", one.gained), ("lost", one.lost)):
            for flip in flips[:MAX_FLIPS]:
                answers = (flip.answer_before, flip.answer_after)
                before, after = (plain(answer or "no answer", 40) for answer in answers)
                text = (
                    f"{kind} {flip.task_id}: {plain(flip.question, 60)} {before} -> {after}"
                    f" (accepted: {plain(flip.reference[0], 40)})"
                )
                # On one line, whatever line breaks the model wrote.
                console.print(Text(" ".join(text.split())), soft_wrap=True)
            if more := len(flips[MAX_FLIPS:]):
                console.print(Text(f"... and {more} more {kind}; --json names all"), soft_wrap=True)
    for note in found.notes:
        console.print(Text(note, "dim"), soft_wrap=True)
