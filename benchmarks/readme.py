"""The numbers of README's section "Proof", from the recorded lines of studies.

    python -m benchmarks.readme

Prints README's table and the two tables of comparisons that no single study has: pairs of two
processors together, and the calls after which an accuracy is reached.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from treegraft.extras.lab.study.file import read_study
from treegraft.extras.lab.study.plan import make_plan
from treegraft.extras.lab.study.results import CALLS, known_runs
from treegraft.extras.statistics import (
    accuracy_at,
    bootstrap_interval,
    permutation_test,
)

STUDIES = Path(__file__).resolve().parents[1] / "studies"
BUDGET = 4000


class World(NamedTuple):
    """A column: a world of a study."""

    study: str
    name: str
    budget: float | None = BUDGET
    """Executed calls at which arms are read; None for the end, with the calls until then."""


WORLDS = {
    "the first word of a thought decides": World("bonus-attack.toml", "done"),
    "a token decides": World("bonus-attack.toml", "no thoughts"),
    "unsure": World("budgets.toml", "unsure"),
    "short questions": World("budgets.toml", "short"),
    "a flawed expert, at the end": World("decisive.toml", "imperfect", None),
}


class Row(NamedTuple):
    """One method, and the names of its arms in the studies; the first that a study has counts."""

    title: str
    arms: tuple[str, ...]


ROWS = (
    Row("GRPO", ("GRPO",)),
    Row("[ARPO](docs/arpo.md)", ("ARPO",)),
    Row("Tree-GRPO", ("Tree-GRPO",)),
    Row("[RAPO](docs/rapo.md)", ("RAPO",)),
    Row("imitation of the expert as it is", ("SFT, raw",)),
    Row("imitation of the [pruned](docs/buffer.md#pruning) expert", ("SFT, pruned",)),
    Row("own lessons, Tree-GRPO", ("own lessons, Tree-GRPO",)),
    Row("own lessons, a bonus for calls", ("own lessons, call bonus",)),
    Row(
        "[commit branching](docs/methods.md#commit-branching), ours",
        ("commit, begun anew", "commit"),
    ),
)


class Point(NamedTuple):
    """One evaluation of a run."""

    calls: float
    """Executed calls until then."""
    accuracy: float


Curve = list[Point]


def curves_of(study: str, world: str, arms: Sequence[str]) -> dict[str, dict[int, Curve]]:
    """Returns the evaluations of the finished runs, by arm and pair."""
    path = STUDIES / study
    plan = make_plan(path, only=[world, *arms])
    lines = known_runs(STUDIES / (plan.study.results or f"{path.stem}.jsonl"), plan.runs)[0]
    found: dict[str, dict[int, Curve]] = {arm: {} for arm in arms}
    for (_, arm, pair), line in lines.items():
        found[arm][pair] = [Point(one[CALLS], one["accuracy"]) for one in line["curve"]]
    return found


def read_at(curve: Curve, calls: float) -> float | None:
    """Returns a run's accuracy after so many calls; None if it ended before."""
    return accuracy_at([one.calls for one in curve], [one.accuracy for one in curve], calls)


def cell(curves: Sequence[Curve], budget: float | None) -> str:
    """Returns an arm's mean accuracy at the budget; without a budget, or if a run ended before it,
    that of the ends with the mean calls until then."""
    if budget is not None:
        at = [value for curve in curves if (value := read_at(curve, budget)) is not None]
        if len(at) == len(curves):
            return f"{statistics.fmean(at):.2f}"
    accuracy = statistics.fmean(curve[-1].accuracy for curve in curves)
    calls = statistics.fmean(curve[-1].calls for curve in curves)
    return f"{accuracy:.2f} at {calls:,.0f}"


def column(world: World) -> list[str]:
    """Returns the cells of a world, one for each row; "" if its study has no such arm."""
    known = read_study(STUDIES / world.study).arms
    chosen = [next((arm for arm in row.arms if arm in known), "") for row in ROWS]
    curves = curves_of(world.study, world.name, [arm for arm in chosen if arm])
    found = [list(curves.get(arm, {}).values()) for arm in chosen]
    return [cell(runs, world.budget) if runs else "" for runs in found]


def table() -> Iterator[str]:
    """Yields the lines of README's table."""
    columns = [column(world) for world in WORLDS.values()]
    yield f"| method | {' | '.join(WORLDS)} |"
    yield "|---" * (1 + len(WORLDS)) + "|"
    for row, *cells in zip(ROWS, *columns, strict=True):
        yield f"| {row.title} | {' | '.join(cells)} |"


class Comparison(NamedTuple):
    """An arm less another one over the pairs of several studies."""

    title: str
    arm: str
    other: str
    worlds: tuple[World, ...]
    """With budget None, runs are read at their ends."""
    is_at_equal_calls: bool = False
    """Whether both runs of a pair are read at the calls of the one that made fewer."""


BOUNDARY = (
    World("methods.toml", "boundary", None),
    World("rapo-ablations.toml", "boundary", None),
)
DONE = (World("bonus-attack.toml", "done"), World("done-again.toml", "done"))
COMPARISONS = (
    Comparison("RAPO less GRPO, a perfect expert, after 30 updates", "RAPO", "GRPO", BOUNDARY),
    Comparison("the same at equal calls of their own", "RAPO", "GRPO", BOUNDARY, True),
    *(
        Comparison(
            f"commit branching less {other}, the first word of a thought decides",
            "commit, begun anew",
            other,
            DONE,
        )
        for other in (
            "own lessons, Tree-GRPO",
            "own lessons, call bonus",
            "own lessons, Tree-GRPO, call bonus",
        )
    ),
    Comparison(
        "commit branching less the nearest arm, the pairs on the AMD EPYC",
        "commit, begun anew",
        "own lessons, Tree-GRPO",
        DONE[1:],
    ),
)


def differences(comparison: Comparison) -> list[float]:
    """Returns the arm's accuracy less the other's, one for each pair that has both."""
    found = []
    for world in comparison.worlds:
        curves = curves_of(world.study, world.name, [comparison.arm, comparison.other])
        ours = curves[comparison.arm]
        theirs = curves[comparison.other]
        for pair in sorted(ours.keys() & theirs.keys()):
            ends = [ours[pair][-1].calls, theirs[pair][-1].calls]
            if world.budget is None and not comparison.is_at_equal_calls:
                found.append(ours[pair][-1].accuracy - theirs[pair][-1].accuracy)
                continue
            calls = min(ends) if world.budget is None else world.budget
            mine = read_at(ours[pair], calls)
            other = read_at(theirs[pair], calls)
            if mine is not None and other is not None:
                found.append(mine - other)
    return found


def pooled_table() -> Iterator[str]:
    """Yields the table of the comparisons: mean difference of the pairs with its 95 % interval, and
    p without a correction for several comparisons."""
    yield "| comparison | pairs | difference | p |"
    yield "|---|---|---|---|"
    for comparison in COMPARISONS:
        found = differences(comparison)
        interval = bootstrap_interval(found)
        assert interval is not None
        p = permutation_test(found, [0.0] * len(found))
        low, high = interval
        difference = f"{statistics.fmean(found):.2f} [{low:.2f}, {high:.2f}]"
        yield f"| {comparison.title} | {len(found)} | {difference} | {p:.4f} |"


ACCURACIES = (0.5, 0.6, 0.7, 0.8, 0.85)


def calls_to(curve: Curve, accuracy: float) -> float | None:
    """Returns the calls after which a run first has an accuracy, linear between evaluations; None
    if it never has."""
    before = curve[0]
    if before.accuracy >= accuracy:
        return before.calls
    for point in curve[1:]:
        if point.accuracy >= accuracy:
            share = (accuracy - before.accuracy) / (point.accuracy - before.accuracy)
            return before.calls + share * (point.calls - before.calls)
        before = point
    return None


class Race(NamedTuple):
    """ARPO and GRPO on the way to an accuracy."""

    accuracy: float
    num_earlier: int
    """Pairs in which ARPO reaches it with fewer calls, or alone."""
    num_pairs: int
    ratios: list[float]
    """ARPO's calls over GRPO's, of the pairs in which both reach it."""

    def ratio(self) -> float:
        """The geometric mean of the ratios."""
        return math.exp(statistics.fmean(map(math.log, self.ratios)))


def races() -> list[Race]:
    """Returns ARPO's races against GRPO in "unsure" of studies/arpo-fair.toml."""
    curves = curves_of("arpo-fair.toml", "unsure", ["ARPO", "GRPO"])
    found = []
    for accuracy in ACCURACIES:
        num_earlier = 0
        ratios = []
        for pair, curve in curves["ARPO"].items():
            ours = calls_to(curve, accuracy)
            theirs = calls_to(curves["GRPO"][pair], accuracy)
            if ours is not None and (theirs is None or ours < theirs):
                num_earlier += 1
            if ours and theirs:
                ratios.append(ours / theirs)
        found.append(Race(accuracy, num_earlier, len(curves["ARPO"]), ratios))
    return found


def race_table() -> Iterator[str]:
    """Yields the table of the races."""
    yield "| accuracy | ARPO is earlier in | its share of GRPO's calls | pairs with both |"
    yield "|---|---|---|---|"
    for race in races():
        earlier = f"{race.num_earlier} of {race.num_pairs}"
        yield f"| {race.accuracy:.2f} | {earlier} | {race.ratio():.2f} | {len(race.ratios)} |"


if __name__ == "__main__":
    for lines in (table(), pooled_table(), race_table()):
        print("\n".join(lines), end="\n\n")
