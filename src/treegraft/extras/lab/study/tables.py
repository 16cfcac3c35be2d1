"""Tables of a study's results: one row for each arm in each world, over complete pairs."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from treegraft.extras.lab.study.results import CALLS, SECONDS, SHOWN, TOKENS, Key, Line, key_of
from treegraft.extras.lab.study.statistics import (
    accuracy_at,
    area,
    bootstrap_interval,
    holm,
    interquartile_mean,
    permutation_test,
    probability_of_improvement,
)
from treegraft.extras.lab.text import ranges

WITH_BUFFER = "calls with the buffer's"
"""A cost of its own: executed calls after those that the buffer's trajectories hold."""
RISE = 0.2
"""By so much accuracy a run has left its start."""
NAMES: Mapping[str, str] = {
    CALLS: "calls",
    WITH_BUFFER: WITH_BUFFER,
    SHOWN: "shown calls",
    SECONDS: "CPU s",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What tables compare: Question(baseline="GRPO", primary=None, at={CALLS: (4000,)})"""

    baseline: str
    primary: Sequence[str] = ()
    """Arms that are each tested against all others."""
    at: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Budgets at which arms are compared, by cost; a cost without one takes, pair by pair, the
    total of the arm that spends least of it."""

    def baseline_of(self, arms: Sequence[str]) -> str:
        """Returns the baseline of a world with these arms: the first of them where it lacks
        ours."""
        return self.baseline if self.baseline in arms else arms[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An arm in a world, over the pairs that all arms have finished. Intervals are 95 % (bootstrap
    over pairs)."""

    world: str
    arm: str
    last: Sequence[float]
    """Accuracy at the last evaluation, pair by pair."""
    mean: float
    interval: tuple[float, float] | None
    iqm: float
    gain: float
    """Mean paired difference to the baseline."""
    gain_interval: tuple[float, float] | None
    better: float
    """Probability of improvement over the baseline."""
    totals: Mapping[str, float]
    """Mean of each cost of a whole run; seconds as those of the median calibration."""
    buffer_calls: float
    """Mean calls of the buffer's attempts, buffer_cpu_s the seconds to make it; these are part of
    the seconds of the curve, the calls are not part of its calls."""
    buffer_cpu_s: float
    buffer_attempts: float
    buffer_cut: float
    """Mean steps that pruning cut."""
    warmup_cpu_s: float
    """Mean seconds of the warm-up."""
    counts_warmup: bool
    """Whether they are part of the seconds of the curve, as where arms of the world differ in their
    warm-ups."""
    tuning: Mapping[str, float]
    at: Mapping[str, Sequence[float | None]]
    """Accuracy at each budget, pair by pair; None where the run ended before."""
    areas: Mapping[str, float | None]
    """Mean area under the accuracy-cost curve up to the same budgets; None where not all pairs
    reach them."""
    num_left: int
    """Pairs that left the start: whose last accuracy is `RISE` above the first."""
    left_after: float | None
    """Median calls at the first evaluation with such an accuracy, of these pairs; None for none."""
    pass_at: Mapping[str, float]
    """Mean pass@k and pass@(k, T) at the last evaluation, where they were sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    """A primary arm less another one: difference, interval, and p of the paired permutation test
    before and after Holm's correction over the arms of its world and column."""

    world: str
    column: str
    primary: str
    other: str
    num_pairs: int
    num_short: int
    """Pairs of which a run ended before the budget; they are compared at the less that both
    spent."""
    place: float
    """Mean cost at which pairs are compared; infinite at the end."""
    difference: float
    interval: tuple[float, float] | None
    p: float
    p_holm: float


class Runs:
    """The results of a study, by world, arm and pair."""

    def __init__(self, lines: Sequence[Line], planned: Sequence[Key] = ()) -> None:
        """Takes lines of finished and of failed runs.

        Args:
            planned: all runs of the study, so that those without a line are named too.
        """
        self._lines: dict[Key, Line] = {key_of(line): line for line in lines if "error" not in line}
        self._errors = {key_of(line): line["error"] for line in lines if "error" in line}
        self._planned = list(dict.fromkeys([*planned, *self._lines, *self._errors]))
        self.worlds = list(dict.fromkeys(key[0] for key in self._planned))
        calibrations = [
            line["calibration_s"] for line in self._lines.values() if line.get("calibration_s")
        ]
        self.calibrations = sorted(calibrations)
        self._reference = statistics.median(calibrations) if calibrations else 1.0

    def arms(self, world: str) -> list[str]:
        """Returns the arms that have a run in the world, in order."""
        return list(dict.fromkeys(arm for place, arm, _ in self._lines if place == world))

    def pairs(self, world: str) -> list[int]:
        """Returns the pairs that all these arms have finished."""
        found = [
            {pair for place, one, pair in self._lines if (place, one) == (world, arm)}
            for arm in self.arms(world)
        ]
        return sorted(set.intersection(*found)) if found else []

    def missing(self, world: str) -> Iterator[str]:
        """Yields a sentence for each arm with runs that are not there: its pairs (`all`, or as in
        `0, 2 to 5`), and why those failed that did."""
        every = dict.fromkeys(pair for place, _, pair in self._planned if place == world)
        for arm in dict.fromkeys(arm for place, arm, _ in self._planned if place == world):
            pairs = [pair for pair in every if (world, arm, pair) not in self._lines]
            failed = {pair: self._errors.get((world, arm, pair)) for pair in pairs}
            why = [
                f"pair {pair} failed: {' '.join(error.split())[-200:]}"
                for pair, error in failed.items()
                if error
            ]
            if pairs:
                also = f" ({'; '.join(why)})" if why else ""
                named = "all" if len(pairs) == len(every) else ranges(pairs)
                yield f"{arm}: {named}{also}"

    @functools.cached_property
    def _own_warmup(self) -> set[str]:
        """Worlds in which the arms of a pair have different warm-ups."""
        found: dict[tuple[str, int], set[str]] = {}
        for (world, _, pair), line in self._lines.items():
            made = line.get("warmup", {})
            name = str(made.get("fingerprint") or line.get("warmup_seed"))
            found.setdefault((world, pair), set()).add(name)
        return {world for (world, _), names in found.items() if len(names) > 1}

    def of(self, world: str, arm: str) -> list[Line]:
        """Returns an arm's runs of those pairs."""
        return [self._lines[world, arm, pair] for pair in self.pairs(world)]

    def has(self, cost: str) -> bool:
        """Returns whether all runs recorded this cost."""
        name = CALLS if cost == WITH_BUFFER else cost
        return all(name in line["curve"][-1] for line in self._lines.values())

    def curve(self, line: Line, cost: str) -> tuple[list[float], list[float]]:
        """Returns the cost so far and the accuracy at each evaluation; the cost of the buffer, and
        of a warm-up that the world's arms do not share, comes first, at the accuracy of the
        start."""
        points, before = line["curve"], 0.0
        name = CALLS if cost == WITH_BUFFER else cost
        costs = [point.get(name, 0.0) for point in points]
        accuracies = [point["accuracy"] for point in points]
        if cost == WITH_BUFFER:
            before = float(line.get("buffer", {}).get("calls", 0))
        if cost == SECONDS:
            own = line.get("calibration_s") or self._reference
            before = self._scaled(line.get("buffer", {}))
            if self.counts_warmup(line["world"]):
                before += self.warmup_cost(line)
            costs = [one * self._reference / own for one in costs]
        if before:
            return [0.0, *(before + one for one in costs)], [accuracies[0], *accuracies]
        return costs, accuracies

    def _scaled(self, costs: Mapping[str, float]) -> float:
        own = costs.get("calibration_s") or self._reference
        return costs.get("cpu_s", 0.0) * self._reference / own

    def counts_warmup(self, world: str) -> bool:
        """Returns whether arms of the world differ in their warm-ups."""
        return world in self._own_warmup

    def warmup_cost(self, line: Line) -> float:
        """Returns the seconds of a run's warm-up; 0 without one."""
        return self._scaled(line.get("warmup", {}))

    def buffer_cost(self, line: Line) -> float:
        """Returns the seconds of a run's buffer; 0 without one."""
        return self._scaled(line.get("buffer", {}))


def mean_of(values: Sequence[float | None]) -> float | None:
    """Returns the mean of the values that are there; None without one."""
    kept = [value for value in values if value is not None]
    return statistics.fmean(kept) if kept else None


def _budgets(
    runs: Runs, world: str, question: Question
) -> Iterator[tuple[str, str, Sequence[float]]]:
    """Each column of accuracy at equal cost: its name, cost, and the budget of each pair."""
    num_pairs = len(runs.pairs(world))
    has_buffer = any("buffer" in line for arm in runs.arms(world) for line in runs.of(world, arm))
    for cost, name in NAMES.items():
        if (cost == WITH_BUFFER and not has_buffer) or not runs.has(cost):
            continue
        given = question.at.get(CALLS if cost in (WITH_BUFFER, SHOWN) else cost, ())
        for at in given:
            yield f"at {at:,.0f} {name}", cost, [at] * num_pairs
        if not given:
            ends = [
                [runs.curve(line, cost)[0][-1] for line in runs.of(world, arm)]
                for arm in runs.arms(world)
            ]
            # A run that spends none of it says nothing about what is affordable.
            least = [min(filter(None, of_pair), default=0.0) for of_pair in zip(*ends, strict=True)]
            yield f"at equal {name}", cost, least


def rows(runs: Runs, world: str, question: Question) -> list[Row]:
    """Returns the rows of a world, in the order of its arms; none where no pair is complete."""
    if not runs.pairs(world):
        return []
    arms, budgets = runs.arms(world), list(_budgets(runs, world, question))
    last = {arm: [line["curve"][-1]["accuracy"] for line in runs.of(world, arm)] for arm in arms}
    reference = last[question.baseline_of(arms)]
    found = []
    for arm in arms:
        lines = runs.of(world, arm)
        gains = [a - b for a, b in zip(last[arm], reference, strict=True)]
        at = {
            name: [
                accuracy_at(*runs.curve(line, cost), limit)
                for line, limit in zip(lines, limits, strict=True)
            ]
            for name, cost, limits in budgets
        }
        areas = {
            name: _mean_of_all(
                [
                    area(*runs.curve(line, cost), limit)
                    for line, limit in zip(lines, limits, strict=True)
                ]
            )
            for name, cost, limits in budgets
        }
        ends = {
            cost: statistics.fmean(runs.curve(line, cost)[0][-1] for line in lines)
            for cost in (CALLS, SHOWN, TOKENS, SECONDS)
            if runs.has(cost)
        }
        found.append(
            Row(
                world=world,
                arm=arm,
                last=last[arm],
                mean=statistics.fmean(last[arm]),
                interval=bootstrap_interval(last[arm]),
                iqm=interquartile_mean(last[arm]),
                gain=statistics.fmean(gains),
                gain_interval=bootstrap_interval(gains),
                better=probability_of_improvement(last[arm], reference),
                totals=ends,
                buffer_calls=_of_buffer(lines, "calls"),
                buffer_cpu_s=statistics.fmean(map(runs.buffer_cost, lines)),
                buffer_attempts=_of_buffer(lines, "attempts"),
                buffer_cut=_of_buffer(lines, "steps_cut"),
                warmup_cpu_s=statistics.fmean(map(runs.warmup_cost, lines)),
                counts_warmup=runs.counts_warmup(world),
                tuning=lines[0].get("tuning", {}),
                at=at,
                areas=areas,
                num_left=len(left := [one for one in map(_left_after, lines) if one is not None]),
                left_after=statistics.median(left) if left else None,
                pass_at=_pass_at([line["curve"][-1] for line in lines]),
            )
        )
    return found


def _pass_at(ends: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each pass@k and pass@(k, T) at the runs' ends."""
    keys = [key for key in ends[0] if key.startswith("eval/pass_")]
    return {key: statistics.fmean(end.get(key, 0.0) for end in ends) for key in keys}


def _mean_of_all(values: Sequence[float | None]) -> float | None:
    return None if None in values else mean_of(values)


def _left_after(line: Line) -> float | None:
    """The calls with which a run had left its start, if it has at its end."""
    start, points = line["curve"][0]["accuracy"], line["curve"]
    if points[-1]["accuracy"] < start + RISE:
        return None
    first = next(point for point in points if point["accuracy"] >= start + RISE)
    return float(first.get(CALLS, 0.0))


def _of_buffer(lines: Sequence[Line], count: str) -> float:
    return statistics.fmean(line.get("buffer", {}).get(count, 0) for line in lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """A primary arm less another one at the executed calls that both of a pair's runs spent: the
    fewer of the two, pair by pair. No run counts beyond its end."""

    world: str
    primary: str
    other: str
    calls: float
    """Mean of those calls over the pairs."""
    difference: float
    interval: tuple[float, float] | None
    """95 %, bootstrap over pairs."""


def at_spent_calls(runs: Runs, world: str, primary: str) -> list[Spent]:
    """Returns a primary arm against each of the others; none where it has no run there."""
    found, arms = [], runs.arms(world) if runs.pairs(world) else []
    for other in arms if primary in arms else ():
        if other == primary:
            continue
        sides = zip(runs.of(world, primary), runs.of(world, other), strict=True)
        curves = [[runs.curve(line, CALLS) for line in pair] for pair in sides]
        limits = [min(costs[-1] for costs, _ in pair) for pair in curves]
        less = [
            (accuracy_at(*ours, limit) or 0.0) - (accuracy_at(*theirs, limit) or 0.0)
            for (ours, theirs), limit in zip(curves, limits, strict=True)
        ]
        found.append(
            Spent(
                world=world,
                primary=primary,
                other=other,
                calls=statistics.fmean(limits),
                difference=statistics.fmean(less),
                interval=bootstrap_interval(less),
            )
        )
    return found


def tests(runs: Runs, world: str, question: Question, primary: str) -> list[Test]:
    """Returns a primary arm against each of the others, at the end and at each budget: pair by
    pair at the budget, or at the less that both runs spent."""
    arms = runs.arms(world) if runs.pairs(world) else []
    if primary not in arms:
        return []
    num_pairs = len(runs.pairs(world))
    columns = [("last", "", [math.inf] * num_pairs), *_budgets(runs, world, question)]
    made: list[Test] = []
    for column, cost, limits in columns:
        of_column = []
        for other in arms:
            if other == primary:
                continue
            sides = zip(runs.of(world, primary), runs.of(world, other), limits, strict=True)
            found = [_compared(runs, ours, theirs, cost, limit) for ours, theirs, limit in sides]
            x, y, places = zip(*found, strict=True)
            p, less = permutation_test(x, y), [a - b for a, b in zip(x, y, strict=True)]
            short = sum(place < limit for place, limit in zip(places, limits, strict=True))
            of_column.append((other, less, p, short, statistics.fmean(places)))
        corrected = holm([p for _, _, p, *_ in of_column])
        made += [
            Test(
                world=world,
                column=column,
                primary=primary,
                other=other,
                num_pairs=num_pairs,
                num_short=short,
                place=place,
                difference=statistics.fmean(less),
                interval=bootstrap_interval(less),
                p=p,
                p_holm=p_holm,
            )
            for (other, less, p, short, place), p_holm in zip(of_column, corrected, strict=True)
        ]
    return made


def _compared(
    runs: Runs, ours: Line, theirs: Line, cost: str, limit: float
) -> tuple[float, float, float]:
    """The accuracies of two runs at a budget, or at the less that both spent, and that place."""
    if not cost:
        return ours["curve"][-1]["accuracy"], theirs["curve"][-1]["accuracy"], limit
    curves = [runs.curve(line, cost) for line in (ours, theirs)]
    # A run that spends none of it has its last accuracy everywhere.
    place = min(limit, *(costs[-1] or math.inf for costs, _ in curves))
    one, other = (accuracy_at(*curve, place) for curve in curves)
    assert one is not None and other is not None, "within both curves"
    return one, other, place


def as_data(runs: Runs, question: Question) -> dict[str, Any]:
    """Returns the same for programs, `place` None at the end."""
    found = {world: rows(runs, world, question) for world in runs.worlds}
    return {
        "baseline": question.baseline,
        "primary": list(question.primary),
        "missing": {world: list(runs.missing(world)) for world in runs.worlds},
        "rows": [asdict(row) for of_world in found.values() for row in of_world],
        "tests": [
            asdict(one) | {"place": one.place if math.isfinite(one.place) else None}
            for world in found
            for primary in question.primary
            for one in tests(runs, world, question, primary)
        ],
        "at_spent_calls": [
            asdict(one)
            for world in found
            for primary in question.primary
            for one in at_spent_calls(runs, world, primary)
        ],
    }
