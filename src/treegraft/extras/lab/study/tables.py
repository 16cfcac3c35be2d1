"""Tables of a study's results in Markdown: a row for each arm of a world, over complete pairs."""

from __future__ import annotations

import functools
import math
import statistics
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from treegraft.extras.lab.study.results import (
    CALLS,
    SECONDS,
    TOKENS,
    Key,
    Line,
    key_of,
    mixed_pairs,
)
from treegraft.extras.lab.text import counted, ranges, table
from treegraft.extras.statistics import (
    Interval,
    accuracy_at,
    bootstrap_interval,
    holm,
    permutation_test,
)

WITH_BUFFER = "calls with the buffer's"
"""A cost of its own: executed calls after those that the buffer's trajectories hold."""
NAMES: Mapping[str, str] = {CALLS: "calls", WITH_BUFFER: WITH_BUFFER, SECONDS: "CPU s"}
"""Costs at which arms are compared, as columns call them."""
# The tables of the protocol were printed with it, so it stays.
RISE = 0.2
"""By so much accuracy a run has left its start."""
SPREAD = 1.05
"""Ratio of calibrations from which a table says that they differ."""
LINE = 116
"""Characters of a line of text."""
Columns = dict[str, Callable[["Row"], str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What tables compare: Question(baseline="GRPO", at={CALLS: (4000,)})"""

    baseline: str
    primary: Sequence[str] = ()
    """Arms that are each tested against all others."""
    at: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Budgets at which arms are compared, by cost; for a cost without one, pair by pair, the total
    of the arm that spends least of it."""

    def baseline_of(self, arms: Sequence[str]) -> str:
        """Returns the baseline of a world with these arms: the first of them if it lacks ours."""
        # A world that was added for one question may lack the study's baseline.
        return self.baseline if self.baseline in arms else arms[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An arm in a world, over the pairs that all arms have finished."""

    arm: str
    lines: Sequence[Line]
    last: Sequence[float]
    """Accuracy at the last evaluation, pair by pair."""
    at: Mapping[str, Sequence[float | None]]
    """Accuracy at each budget, pair by pair; None if the run ended before."""

    def of_buffer(self, count: str) -> float:
        """Returns the mean of a count of its buffers; 0 without one."""
        return statistics.fmean(line.get("buffer", {}).get(count, 0) for line in self.lines)

    def tuning(self, count: str) -> float:
        """Returns what choosing its settings took."""
        # The same for all pairs: settings are chosen once for an arm.
        return float(self.lines[0].get("tuning", {}).get(count, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    """A primary arm less another one at a budget, or at the end."""

    column: str
    other: str
    differences: Sequence[float]
    num_short: int
    """Pairs of which a run ended before the budget; they are compared at the less that both
    spent."""
    place: float
    """Mean cost at which pairs are compared; infinite at the end."""
    p: float
    """Of the paired permutation test."""
    p_holm: float
    """The same after Holm's correction over the arms of its world and column."""

    @property
    def short(self) -> str:
        """Where pairs are compared, if some run ended before the budget."""
        return f" (at {self.place:,.0f})" if self.num_short else ""


class Runs:
    """The results of a study, by world, arm and pair."""

    def __init__(self, lines: Sequence[Line], planned: Sequence[Key] = ()) -> None:
        """Args: planned: all runs of the study, so that those without a line are named too."""
        # A run that was made again counts as it came out last.
        self._lines: dict[Key, Line] = {key_of(line): line for line in lines}
        self._planned = list(dict.fromkeys([*planned, *self._lines]))
        self.worlds = list(dict.fromkeys(key[0] for key in self._planned))
        self.calibrations: list[float] = []
        for line in self._lines.values():
            # Lines of early studies have none.
            if calibration := line.get("calibration_s"):
                self.calibrations.append(calibration)
        self.calibrations.sort()
        # The median, since one calibration on a busy machine would shift all seconds.
        self._reference = statistics.median(self.calibrations) if self.calibrations else 1.0

    def arms(self, world: str) -> list[str]:
        """Returns the arms that have a run in the world, in order."""
        return list(dict.fromkeys(arm for place, arm, _ in self._lines if place == world))

    def pairs(self, world: str) -> list[int]:
        """Returns the pairs that all these arms have finished."""
        found: dict[str, set[int]] = {}
        for place, arm, pair in self._lines:
            if place == world:
                found.setdefault(arm, set()).add(pair)
        # Paired tests need every arm of a pair; a study under way has pairs that lack some.
        return sorted(set.intersection(*found.values())) if found else []

    def missing(self, world: str) -> Iterator[str]:
        """Yields the pairs of each arm that are not there: "GRPO: all", "RAPO: 0, 2 to 5"."""
        arms: dict[str, None] = {}
        every: dict[int, None] = {}
        for place, arm, pair in self._planned:
            if place == world:
                arms[arm] = None
                every[pair] = None
        for arm in arms:
            pairs = [pair for pair in every if (world, arm, pair) not in self._lines]
            if pairs:
                yield f"{arm}: {'all' if len(pairs) == len(every) else ranges(pairs)}"

    def of(self, world: str, arm: str) -> list[Line]:
        """Returns an arm's runs of those pairs."""
        return [self._lines[world, arm, pair] for pair in self.pairs(world)]

    def all_of(self, world: str) -> list[Line]:
        """Returns the runs of all arms of those pairs."""
        found = []
        for arm in self.arms(world):
            found += self.of(world, arm)
        return found

    def has(self, cost: str) -> bool:
        """Returns whether all runs recorded this cost."""
        name = CALLS if cost == WITH_BUFFER else cost
        return all(name in line["curve"][-1] for line in self._lines.values())

    def curve(self, line: Line, cost: str) -> tuple[list[float], list[float]]:
        """Returns the cost so far and the accuracy at each evaluation; the cost of the buffer
        comes first, at the accuracy of the start. The arms of a world share their warm-up."""
        name = CALLS if cost == WITH_BUFFER else cost
        before = 0.0
        if cost == WITH_BUFFER:
            before = float(line.get("buffer", {}).get("calls", 0))
        if cost == SECONDS:
            before = self.buffer_seconds(line)
        costs = []
        accuracies = []
        for point in line["curve"]:
            spent = point.get(name, 0.0)
            if cost == SECONDS:
                # A slow machine, or one with much other work, must not make a method dear.
                spent = spent * self._reference / (line.get("calibration_s") or self._reference)
            costs.append(before + spent)
            accuracies.append(point["accuracy"])
        if before:
            return [0.0, *costs], [accuracies[0], *accuracies]
        return costs, accuracies

    def buffer_seconds(self, line: Line) -> float:
        """Returns the seconds of a run's buffer, as those of the median calibration; 0 without
        one."""
        costs = line.get("buffer", {})
        own = costs.get("calibration_s") or self._reference
        return float(costs.get("cpu_s", 0.0) * self._reference / own)


def rows(runs: Runs, world: str, question: Question) -> list[Row]:
    """Returns the rows of a world, in the order of its arms; none if no pair is complete."""
    # The heading says that no pair is complete yet.
    if not runs.pairs(world):
        return []
    budgets = list(_budgets(runs, world, question))
    found = []
    for arm in runs.arms(world):
        lines = runs.of(world, arm)
        at: dict[str, list[float | None]] = {}
        for name, cost, limits in budgets:
            at[name] = []
            for line, limit in zip(lines, limits, strict=True):
                at[name].append(accuracy_at(*runs.curve(line, cost), limit))
        found.append(Row(arm=arm, lines=lines, last=[_end(line) for line in lines], at=at))
    return found


def _end(line: Line) -> float:
    return float(line["curve"][-1]["accuracy"])


def _budgets(
    runs: Runs, world: str, question: Question
) -> Iterator[tuple[str, str, Sequence[float]]]:
    """Each column of accuracy at equal cost: its name, cost, and the budget of each pair."""
    has_buffer = any("buffer" in line for line in runs.all_of(world))
    for cost, name in NAMES.items():
        if (cost == WITH_BUFFER and not has_buffer) or not runs.has(cost):
            continue
        asked = question.at.get(CALLS if cost == WITH_BUFFER else cost, ())
        for at in asked:
            yield f"at {at:,.0f} {name}", cost, [at] * len(runs.pairs(world))
        if not asked:
            ends = []
            for arm in runs.arms(world):
                ends.append([runs.curve(line, cost)[0][-1] for line in runs.of(world, arm)])
            least = []
            for of_pair in zip(*ends, strict=True):
                # A run that spends none of it says nothing about what is affordable.
                least.append(min(filter(None, of_pair), default=0.0))
            yield f"at equal {name}", cost, least


# ---------------------------------------------------------------------- tests


def tests(runs: Runs, world: str, question: Question, primary: str) -> list[Test]:
    """Returns a primary arm against each of the others, at the end and at each budget: pair by
    pair at the budget, or at the less that both runs spent."""
    arms = runs.arms(world) if runs.pairs(world) else []
    # A primary arm need not run in every world of its study.
    if primary not in arms:
        return []
    # At the end no budget cuts a run short.
    endless = [math.inf] * len(runs.pairs(world))
    made: list[Test] = []
    for column, cost, limits in [("last", "", endless), *_budgets(runs, world, question)]:
        found = []
        for other in arms:
            if other != primary:
                found.append(_test(runs, world, (primary, other), column, cost, limits))
        # One family of tests is the arms of one world at one budget, as the protocol says.
        corrected = holm([one.p for one in found])
        for one, p in zip(found, corrected, strict=True):
            made.append(replace(one, p_holm=p))
    return made


def _test(
    runs: Runs,
    world: str,
    arms: tuple[str, str],
    column: str,
    cost: str,
    limits: Sequence[float],
) -> Test:
    ours = []
    theirs = []
    places = []
    differences = []
    num_short = 0
    lines = (runs.of(world, arms[0]), runs.of(world, arms[1]))
    for first, second, limit in zip(*lines, limits, strict=True):
        one, other, place = _compared(runs, first, second, limit, cost)
        ours.append(one)
        theirs.append(other)
        places.append(place)
        differences.append(one - other)
        num_short += place < limit
    p = permutation_test(ours, theirs)
    return Test(
        column=column,
        other=arms[1],
        differences=differences,
        num_short=num_short,
        place=statistics.fmean(places),
        p=p,
        # Until all tests of the column are there.
        p_holm=p,
    )


def _compared(
    runs: Runs, ours: Line, theirs: Line, limit: float, cost: str
) -> tuple[float, float, float]:
    """The accuracies of two runs at a budget, or at the less that both spent, and that place."""
    # The column "last" has no budget.
    if not cost:
        return _end(ours), _end(theirs), limit
    own = runs.curve(ours, cost)
    other = runs.curve(theirs, cost)
    # A run that spends none of it has its last accuracy everywhere.
    place = min(limit, own[0][-1] or math.inf, other[0][-1] or math.inf)
    first = accuracy_at(*own, place)
    second = accuracy_at(*other, place)
    assert first is not None and second is not None, "within both curves"
    return first, second, place


# ---------------------------------------------------------------------- Markdown


def markdown(
    runs: Runs, question: Question, *, is_brief: bool = False, with_baseline: bool = False
) -> str:
    """Returns the tables of a study, with what a reader has to know about its runs.

    Args:
        is_brief: one table a world, with accuracy at the first budget of calls alone.
        with_baseline: in a brief one also the difference to the baseline at the end, as without a
            primary arm.
    """
    lines = list(_about(runs))
    for world in runs.worlds:
        found = rows(runs, world, question)
        lines += _heading(runs, world, found)
        if not found:
            continue
        made = {primary: tests(runs, world, question, primary) for primary in question.primary}
        baseline = question.baseline_of(runs.arms(world))
        gained = baseline if with_baseline or not (is_brief and made) else None
        # After the tests, whose order is that of the study.
        found = _by_accuracy(found)
        lines += _table(found, _arm_columns(found, made, gained, is_brief=is_brief))
        if not is_brief:
            lines += _table(found, _cost_columns(runs, found))
            for primary, own in made.items():
                lines += _tests(own, primary)
    return "\n".join(lines)


def _about(runs: Runs) -> Iterator[str]:
    dates = set()
    machines = set()
    commits = set()
    is_dirty = False
    for world in runs.worlds:
        for line in runs.all_of(world):
            if "date" in line:
                dates.add(line["date"])
            machines.add(str((line.get("machine") or {}).get("cpu", "")))
            if line.get("commit"):
                commits.add(str(line["commit"])[:7])
            is_dirty |= bool(line.get("is_dirty"))
    # Some machines do not say what they are.
    machines.discard("")
    said = []
    if dates:
        said.append(" to ".join(dict.fromkeys([min(dates), max(dates)])))
    if machines:
        said.append(", ".join(sorted(machines)))
    if commits:
        said.append(f"commit{'s' * (len(commits) > 1)} {', '.join(sorted(commits))}")
    if is_dirty:
        said.append("with changes that are not committed")
    if said:
        yield ", ".join(said) + "."
    if runs.calibrations and runs.calibrations[-1] > SPREAD * runs.calibrations[0]:
        yield (
            f"The calibration took {runs.calibrations[0]:.3f} to {runs.calibrations[-1]:.3f} CPU s"
            " beside the runs; their CPU seconds are scaled to its median."
        )
    if said:
        yield ""


def _heading(runs: Runs, world: str, found: Sequence[Row]) -> list[str]:
    """A world's name and pairs, those that are left out, and those whose runs are no pairs."""
    pairs = counted(len(found[0].last), "pair") if found else ""
    lines = [
        f"**{world}**, {pairs}" if found else f"**{world}**: no pair is complete for all arms yet."
    ]
    lines.append("")
    # Else a table over few pairs would look like one over all.
    if missing := list(runs.missing(world)):
        said = "Pairs that are not there: " + ". ".join(missing) + "."
        lines += [*textwrap.wrap(said, LINE, break_on_hyphens=False), ""]
    if mixed := mixed_pairs(runs.all_of(world)):
        lines += [
            f"Not all arms began with the same weights in pairs {', '.join(map(str, mixed))}: their"
            " warm-ups were trained on different machines. Differences between arms are less exact"
            " than those of true pairs.",
            "",
        ]
    return lines


def _by_accuracy(found: Sequence[Row]) -> list[Row]:
    """The arms that reached the first budget of calls first, by their accuracy there; then the
    others, by their accuracy at the end."""
    # Calls are the cost that the protocol compares at; seconds depend on the machine.
    calls = _first_calls(found)
    if calls is None:
        return list(found)
    reached: list[Row] = []
    short: list[Row] = []
    for row in found:
        # A mean at a budget that some runs did not reach would be one of chosen pairs.
        (short if None in row.at[calls] else reached).append(row)
    reached.sort(key=lambda row: -statistics.fmean(one or 0.0 for one in row.at[calls]))
    short.sort(key=lambda row: -statistics.fmean(row.last))
    return reached + short


def _first_calls(found: Sequence[Row]) -> str | None:
    return next((name for name in found[0].at if name.endswith(f" {NAMES[CALLS]}")), None)


def _table(found: Sequence[Row], columns: Columns) -> list[str]:
    body = []
    for row in found:
        body.append([cell(row) for cell in columns.values()])
    return [*table(list(columns), body), ""]


def _arm_columns(
    found: Sequence[Row],
    made: Mapping[str, Sequence[Test]],
    baseline: str | None,
    *,
    is_brief: bool,
) -> Columns:
    calls = _first_calls(found)
    columns: Columns = {"arm": _named(found)}
    for name in found[0].at:
        if name == calls or not is_brief:
            columns[name] = functools.partial(_at, name)
    # The first primary arm that has runs in this world.
    primary = next((one for one, own in made.items() if own), None)
    if is_brief and calls is not None and primary is not None:
        there = {}
        for one in made[primary]:
            if one.column == calls:
                there[one.other] = one
        columns[f"{primary} minus this arm"] = lambda row: _difference(there.get(row.arm))
    columns["at the end"] = lambda row: _interval(row.last)
    if baseline is not None:
        (base,) = (row.last for row in found if row.arm == baseline)
        columns[f"this arm minus {baseline} at the end"] = functools.partial(_gain, base, baseline)
    columns["left the start, after calls"] = _left
    if is_brief:
        columns["calls"] = _own_and_buffers_calls
        return columns
    # Studies with several samples a question have pass@k too.
    for key in found[0].lines[0]["curve"][-1]:
        if key.startswith("eval/pass_"):
            title = key.removeprefix("eval/").replace("_at_", "@").replace("_", " ")
            columns[title] = functools.partial(_mean_end, key)
    return columns


def _cost_columns(runs: Runs, found: Sequence[Row]) -> Columns:
    def total(cost: str, form: str, row: Row) -> str:
        return format(statistics.fmean(runs.curve(one, cost)[0][-1] for one in row.lines), form)

    # Columns of zeros would say nothing in a study without buffers.
    has_buffer = any(row.of_buffer("calls") or row.of_buffer("cpu_s") for row in found)
    seconds = "CPU s, buffer included" if has_buffer else "CPU s"
    columns: Columns = {"arm": lambda row: row.arm}
    for title, cost in (("calls", CALLS), ("tokens", TOKENS), (seconds, SECONDS)):
        if runs.has(cost):
            form = ",.1f" if cost == SECONDS else ",.0f"
            columns[title] = functools.partial(total, cost, form)
    if has_buffer:
        for title, count in (
            ("buffer's attempts", "attempts"),
            ("buffer's calls", "calls"),
            ("steps cut", "steps_cut"),
        ):
            columns[title] = functools.partial(_of_buffer, count)
        columns["buffer's CPU s"] = lambda row: (
            f"{statistics.fmean(map(runs.buffer_seconds, row.lines)):,.1f}"
        )
    if any(row.tuning("runs") for row in found):
        columns["tuning calls"] = lambda row: f"{row.tuning('calls'):,.0f}"
        columns["tuning CPU s"] = lambda row: f"{row.tuning('cpu_s'):,.1f}"
    return columns


def _of_buffer(count: str, row: Row) -> str:
    return f"{row.of_buffer(count):,.0f}"


def _tests(found: Sequence[Test], primary: str) -> list[str]:
    if not found:
        return []
    head = ["column", "other arm", "pairs", f"{primary} minus the other", "p", "p (Holm)"]
    body = []
    for one in found:
        cells = [one.column, one.other, f"{len(one.differences)}{one.short}"]
        body.append([*cells, _interval(one.differences), f"{one.p:.4f}", f"{one.p_holm:.4f}"])
    return [*table(head, body), ""]


# ---------------------------------------------------------------------- cells


def _interval(values: Sequence[float]) -> str:
    interval: Interval | None = bootstrap_interval(values)
    mean = f"{statistics.fmean(values):.2f}"
    return mean if interval is None else f"{mean} [{interval[0]:.2f}, {interval[1]:.2f}]"


def _at(name: str, row: Row) -> str:
    """The mean at a budget if every run got there; else how many did, since a mean of these would
    be one of chosen pairs."""
    values = row.at[name]
    reached = [value for value in values if value is not None]
    if len(reached) < len(values):
        return f"- ({len(reached)} of {len(values)})"
    return f"{statistics.fmean(reached):.2f}"


def _gain(base: Sequence[float], baseline: str, row: Row) -> str:
    if row.arm == baseline:
        return ""
    return _interval([ours - theirs for ours, theirs in zip(row.last, base, strict=True)])


def _mean_end(key: str, row: Row) -> str:
    return f"{statistics.fmean(line['curve'][-1].get(key, 0.0) for line in row.lines):.2f}"


def _named(found: Sequence[Row]) -> Callable[[Row], str]:
    """An arm's name, with its development runs if another arm had more."""
    # An arm with fewer development runs than others had less chance, and readers have to see it.
    most = max(row.tuning("runs") for row in found)

    def named(row: Row) -> str:
        own = row.tuning("runs")
        return row.arm if own == most else f"{row.arm} ({own:.0f} of {most:.0f} tuning runs)"

    return named


def _difference(one: Test | None) -> str:
    if one is None:
        return ""
    return f"{_interval(one.differences)}, p {one.p_holm:.3f}{one.short}"


def _left(row: Row) -> str:
    """How many pairs left the start, and the median of the calls with which they had."""
    calls = []
    for line in row.lines:
        # From the run's own start: pairs begin with warm-ups of different strength.
        goal = line["curve"][0]["accuracy"] + RISE
        if _end(line) >= goal:
            first = next(point for point in line["curve"] if point["accuracy"] >= goal)
            calls.append(float(first.get(CALLS, 0.0)))
    after = f", {statistics.median(calls):,.0f}" if calls else ""
    return f"{len(calls)} of {len(row.lines)}{after}"


def _own_and_buffers_calls(row: Row) -> str:
    """The executed calls, and behind a plus those of the buffer's attempts."""
    totals = [line["curve"][-1].get(CALLS) for line in row.lines]
    # A run that did not count them has no mean.
    if None in totals:
        return "-"
    own = f"{statistics.fmean(totals):,.0f}"
    bought = row.of_buffer("calls")
    return f"{own} + {bought:,.0f}" if bought else own
