"""Rows of a benchmark: ways of doing the same work, alternating in one run, and the ratio of their
medians."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from treegraft.core.errors import DataError, SettingError, nearest
from treegraft.core.files import write_atomically
from treegraft.extras.lab.machine import load_average


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a benchmark's table.

    Row(what="sampling, 16 x 128 tokens", against="transformers generate", ratio=4.5, ours=301.0,
    theirs=67.0, unit="tokens/s",
        num_runs=5)
    """

    what: str
    """The work that was done."""
    against: str
    """What ours is compared with."""
    ratio: float
    """How many times better ours is, unless `unit` says what it is."""
    ours: float
    """Median of our runs, in `unit`."""
    theirs: float
    """Median of the other's runs, in `unit`; where nothing runs, the number that ours is held
    against."""
    unit: str
    num_runs: int
    """Runs of each side behind the medians, the first ones that do not count left out."""


@dataclass(frozen=True, slots=True)
class Side:
    """One way of doing the work. What runs before and after is not timed."""

    work: Callable[[int], Any]
    """Does the work of a run, 0 for the one that does not count; its result goes to `after`."""
    before: Callable[[int], None] | None = None
    after: Callable[[int, Any], None] | None = None


def alternate(
    sides: Mapping[str, Side], num_runs: int, *, num_first: int = 1
) -> dict[str, list[float]]:
    """Returns the seconds of each side's runs; the sides take turns, in turned order every other
    round.

    Args:
        num_first: rounds before them that do not count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for run in range(num_first + num_runs):
        names = list(sides) if run % 2 == 0 else list(sides)[::-1]
        for name in names:
            side = sides[name]
            if side.before is not None:
                side.before(run)
            began = time.perf_counter()
            result = side.work(run)
            spent = time.perf_counter() - began
            if side.after is not None:
                side.after(run, result)
            if run >= num_first:
                seconds[name].append(spent)
    return seconds


def compare(
    what: str,
    ours: Callable[[], object],
    theirs: Callable[[], object],
    against: str,
    num_runs: int = 5,
) -> float:
    """Returns how many times faster ours is, after one run of each that does not count; prints a
    line."""
    seconds = alternate(
        {"ours": Side(lambda _: ours()), "theirs": Side(lambda _: theirs())}, num_runs
    )
    mine, other = (statistics.median(times) for times in seconds.values())
    print(
        f"{what}: {other / mine:.2f}x against {against} (medians of {num_runs}: {mine:.2f} s,"
        f" {other:.2f} s)",
        flush=True,
    )
    return other / mine


def speed_row(
    what: str,
    against: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    amount: float,
    unit: str,
) -> Row:
    """Returns the row of two sides that did the same `amount` of work in these seconds: amount / s
    each, ratio ours / theirs."""
    mine = amount / statistics.median(ours)
    other = amount / statistics.median(theirs)
    return Row(
        what=what,
        against=against,
        ratio=mine / other,
        ours=mine,
        theirs=other,
        unit=unit,
        num_runs=len(ours),
    )


def time_row(what: str, against: str, ours: Sequence[float], theirs: Sequence[float]) -> Row:
    """Returns the row of two sides in seconds: the ratio is theirs / ours."""
    mine = statistics.median(ours)
    other = statistics.median(theirs)
    return Row(
        what=what,
        against=against,
        ratio=other / mine,
        ours=mine,
        theirs=other,
        unit="s",
        num_runs=len(ours),
    )


def fit_exponent(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Returns (exponent b, its standard error) of seconds = a · size^b, by least squares on the
    logarithms.

    The error is NaN with fewer than three points.

    Raises:
        ValueError: fewer than two sizes that differ.
    """
    if len(sizes) < 2 or len(set(sizes)) < 2:
        raise ValueError(
            f"fit_exponent: got the sizes {list(sizes)}; expected two or more that differ"
        )
    x = [math.log(size) for size in sizes]
    y = [math.log(second) for second in seconds]
    mean_x = statistics.fmean(x)
    mean_y = statistics.fmean(y)
    spread = math.fsum((a - mean_x) ** 2 for a in x)
    slope = math.fsum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    if len(x) < 3:
        return slope, math.nan
    rest = math.fsum((b - mean_y - slope * (a - mean_x)) ** 2 for a, b in zip(x, y, strict=True))
    return slope, math.sqrt(rest / (len(x) - 2) / spread)


# ---------------------------------------------------------------------- where, and what came out


Case = Callable[[], Iterable[Row]]
"""One part of a benchmark, which can be run alone."""


@dataclass(slots=True)
class Report:
    """Rows as they come, printed and written at once, so that a run that is cut off leaves what it
    had."""

    machine: dict[str, Any]
    file: Path | None = None
    """Where the JSON goes; None for nowhere."""
    say: Callable[[str], None] = print
    """Takes a line for the reader."""
    rows: list[Row] = field(default_factory=list)

    def keep_earlier(self) -> None:
        """Takes over the rows of an existing file; what is measured again replaces its old row.

        Raises:
            DataError: the file is not one of ours.
        """
        if self.file is None or not self.file.exists():
            return
        try:
            listed = json.loads(self.file.read_text(encoding="utf-8"))["rows"]
            self.rows = [Row(**row) for row in listed]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise DataError(
                f"'{self.file}' is not the JSON of a benchmark ({error}); expected one, or leave"
                " out --append."
            ) from error

    def run(self, cases: Mapping[str, Case], only: Sequence[str]) -> list[Row]:
        """Runs the cases chosen and returns all rows.

        Raises:
            SettingError: a name in `only` that no case has.
        """
        for name in chosen_cases(cases, only):
            self.say(f"-- {name}")
            for row in cases[name]():
                self.add(row)
        return self.rows

    def add(self, row: Row) -> None:
        """Prints and writes a row, in the place of an older one of the same work and peer."""
        places = [
            n
            for n, other in enumerate(self.rows)
            if (other.what, other.against) == (row.what, row.against)
        ]
        if places:
            self.rows[places[0]] = row
        else:
            self.rows.append(row)
        self.say(
            f"{row.what}: {row.ratio:.2f} against {row.against} ({number(row.ours)} and"
            f" {number(row.theirs)} {row.unit}, medians of {row.num_runs})"
        )
        self.write()

    def write(self) -> None:
        """Writes the JSON, where one is wanted."""
        if self.file is not None:
            content = {
                "machine": self.machine | {"load_average_end": load_average()},
                "rows": [asdict(row) for row in self.rows],
            }
            write_atomically(self.file, json.dumps(content, indent=1) + "\n")


def chosen_cases(cases: Iterable[str], only: Sequence[str]) -> list[str]:
    """Returns the names to run, in order: all, or those that are named or begin with a name and a
    blank.

    Raises:
        SettingError: a name that fits none.
    """
    known = list(cases)
    for name in only:
        if not any(_fits(case, name) for case in known):
            raise SettingError(
                f"--only: there is no part '{name}'; expected"
                f" {', '.join(known)}.{nearest(name, known)}"
            )
    return [case for case in known if not only or any(_fits(case, name) for name in only)]


def _fits(case: str, name: str) -> bool:
    return f"{case} ".startswith(f"{name} ")


def markdown(rows: Sequence[Row]) -> Iterator[str]:
    """Gives the lines of a table."""
    yield "| what | against | ratio | ours | theirs | unit | runs |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        cells = (
            row.what,
            row.against,
            f"{row.ratio:.2f}",
            number(row.ours),
            number(row.theirs),
            row.unit,
            str(row.num_runs),
        )
        yield f"| {' | '.join(cells)} |"


def number(value: float) -> str:
    """Returns a number with three or four significant digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
