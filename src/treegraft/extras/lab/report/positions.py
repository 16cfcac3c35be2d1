"""Entropy by position: how unsure the policy is at the first, second, ... token that it samples
after the prompt and after a tool's result, from recorded trees.

ARPO's preliminary experiment (Dong et al., arXiv 2507.19849, sec. 2.2): entropy rises in the
first 10 to 50 tokens after a tool's result.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from treegraft import Step, Tree
from treegraft.extras.lab.report.bands import LEVEL, Point, shared_points
from treegraft.extras.lab.report.drawing import (
    draw_band,
    fit_y,
    looks,
    new_figure,
    printable,
)
from treegraft.extras.lab.report.figure import Cell, MissingFigure, ReportFigure, Table
from treegraft.extras.lab.report.groups import INTERVAL_SEEDS, Group, ReportData
from treegraft.extras.lab.report.trees import MOST_FILES
from treegraft.parts import BranchCause, GraftCause, RestartCause, RetryCause, StoredCause

MOST_POSITIONS = 50
"""Tokens of a step that are looked at: the span of the paper's experiment."""
BY_TOOL, BY_RESULTS = "after", "results so far"
PROMPT = "the prompt"
_MOST_ROWS = 3
_LOOKS = (4, 0, 1, 2, 3, 5, 6)
"""Of the curves of a panel, that after the prompt first, in black."""

Series = tuple[str, str]
"""How steps are told apart, and which of them: (BY_TOOL, "search"), (BY_RESULTS, "2")."""


@dataclass(slots=True)
class Moments:
    """Sums over trees, of which each has given n_i entropies with the sum S_i."""

    num_trees: int = 0
    count: int = 0
    """Σ n_i, the steps."""
    total: float = 0.0
    """Σ S_i, nats."""
    total_squared: float = 0.0
    cross: float = 0.0
    """Σ S_i n_i."""
    count_squared: int = 0

    def add(self, values: Sequence[float]) -> None:
        """Counts the entropies of one tree, in nats; at least one."""
        count, total = len(values), math.fsum(values)
        self.num_trees += 1
        self.count += count
        self.total += total
        self.total_squared += total * total
        self.cross += total * count
        self.count_squared += count * count

    def point(self, position: int) -> Point:
        """Returns the mean over steps with its 95 % interval over trees; without one where there is
        but one tree.

        m = Σ S_i / Σ n_i,  m ± t(k-1, 0.975) √(k/(k-1) Σ (S_i - m n_i)²) / Σ n_i  over k trees

        The variance of a ratio (W. G. Cochran, "Sampling techniques", 1977, sec. 6.3): steps of one
        tree share their question, so they are no independent observations.
        """
        mean, k = self.total / self.count, self.num_trees
        if k < 2:
            return Point(position, mean, None, None, k, mean, mean)
        from scipy.stats import t

        spread = self.total_squared - 2 * mean * self.cross + mean**2 * self.count_squared
        error = math.sqrt(k / (k - 1) * max(0.0, spread)) / self.count
        half = float(t.ppf(0.5 + LEVEL / 2, k - 1)) * error
        return Point(position, mean, mean - half, mean + half, k, mean, mean)


class PositionMeans:
    """Entropies of a run's live steps by what stands before them and by position (`live_steps`)."""

    def __init__(self) -> None:
        self.moments: dict[Series, list[Moments]]
        self.moments = defaultdict(lambda: [Moments() for _ in range(MOST_POSITIONS)])
        """[MOST_POSITIONS] of each series; without a step behind them from some position on."""
        self.num_sampled = 0
        """Steps with sampled tokens, live or not."""
        self.num_live = 0
        self.is_measured = False
        """Whether any entropy is other than 0: engines that measure none record 0."""
        self.is_bound = False
        """Whether any is over the most likely tokens only."""

    def add(self, update: int, tree: Tree) -> None:
        """Counts the live steps of a tree."""
        found: dict[tuple[Series, int], list[float]] = defaultdict(list)
        self.num_sampled += sum(step.num_sampled > 0 for step in tree.steps)
        for step, after, num_results in live_steps(tree):
            self.num_live += 1
            entropies = step.sampled_entropies
            self.is_measured |= any(entropies)
            self.is_bound |= step.entropy_kind == "top_k"
            for place, entropy in enumerate(islice(entropies, MOST_POSITIONS)):
                found[(BY_TOOL, after), place].append(entropy)
                found[(BY_RESULTS, str(num_results)), place].append(entropy)
        for (series, place), values in found.items():
            self.moments[series][place].add(values)

    def points(self, series: Series) -> list[Point]:
        """Returns a mean for each position that any step has, from position 1 on."""
        moments = self.moments.get(series, ())
        return [one.point(place) for place, one in enumerate(moments, start=1) if one.count]


_OTHERS = BranchCause | GraftCause | RestartCause | RetryCause | StoredCause | None
"""Causes of steps that do not show the policy by itself."""


def live_steps(tree: Tree) -> Iterator[tuple[Step, str, int]]:
    """Yields the steps that show the policy by itself: what stands before each (the prompt, or the
    names of the tools whose results it follows) and the steps with results above it.

    Left out are grafts, stored steps, branches and steps with a forced opening, and everything
    below them: a branch stands where entropy was high, and the step beside it has been counted.
    Replayed groups do not stand in an update's file.
    """
    num_results = {tree.root.id: 0}
    """By live step, those below it."""
    above = {step.id: step for step in tree.steps}
    for step in tree.steps[1:]:
        parent = above[str(step.parent)]
        is_own = not isinstance(step.cause, _OTHERS)
        if not is_own or parent.id not in num_results or not step.sampled_mask[:1].any():
            continue
        count = num_results[parent.id]
        num_results[step.id] = count + bool(step.content.observations)
        calls = parent.content.calls[: len(parent.content.observations)]
        after = " + ".join(dict.fromkeys(call.name for call in calls))
        if parent is tree.root or after:
            yield step, after or PROMPT, count


def by_position(data: ReportData) -> ReportFigure | MissingFigure:
    """Returns the entropy at each position of a step, by the tool whose result it follows and by
    the number of results so far."""
    title = "Entropy by position after a tool's result"
    notes, means = list[str](), dict[str, PositionMeans]()
    for record in (record for group in data.groups for record in group.records):
        if record.run is None:
            continue
        reading = data.trees.of(record.run)
        found = reading.of(PositionMeans)
        notes += reading.notes
        if found.is_measured:
            means[record.name] = found
        elif found.num_live:
            notes.append(
                f"{record.name}: its engine recorded no entropies. engine.kind = 'native' records"
                " them, and 'vllm' with engine.vllm.entropies = 'measured'."
            )
        if found.is_bound:
            notes.append(
                f"{record.name}: its entropies are over the most likely tokens only, a lower"
                " bound; engine.vllm.entropies = 'measured' records whole ones."
            )
    measured = [one for one in data.groups if any(r.name in means for r in one.records)]
    if not measured:
        why = "no run folder with recorded trees was given (track.record_trees)."
        return MissingFigure(title, " ".join(notes) or why)
    rows, drawn = list[tuple[Cell, ...]](), measured[:_MOST_ROWS]
    figure, axes = new_figure(len(drawn), 2, 2.3 * len(drawn))
    for place, group in enumerate(measured):
        own = [means[record.name] for record in group.records if record.name in means]
        curves = {series: _points(own, series) for series in _series(own)}
        rows += _rows(group, own, curves)
        if place < len(drawn):
            _draw(axes[2 * place : 2 * place + 2], group, curves)
    if left := ", ".join(group.label for group in measured[_MOST_ROWS:]):
        notes.append(f"For want of room in the table only: {left}.")
    columns = ("panel", "group", "by", "which", "position", "steps", "trees", "runs")
    table = Table((*columns, "mean", "low", "high"), rows)
    return ReportFigure(title, _caption(drawn, means), table, figure, notes)


def _caption(groups: Sequence[Group], means: Mapping[str, PositionMeans]) -> str:
    live, sampled = (
        sum(getattr(one, name) for one in means.values()) for name in ("num_live", "num_sampled")
    )
    counts = {sum(record.name in means for record in group.records) for group in groups}
    alone = "" if counts == {1} else f"Bands: {INTERVAL_SEEDS}; of a single run, "
    return (
        "Mean entropy, in nats, of the distribution that each sampled token of a step was drawn"
        " from; position 1 is the first token behind the prompt or the result. Left: by the tool"
        " whose result stands before the step. Right: by the number of steps with results so far."
        f" Counted are {live:,} of {sampled:,} sampled steps: all but branches, steps with a forced"
        " opening, and what stands below these or below a retrieved step. A position counts the"
        f" steps that reach it, so later ones are of longer steps; {MOST_POSITIONS} at most."
        f" {alone or 'Bands: '}95 % interval over trees, as steps of one question are not"
        " independent; cut at the panels' edges."
        f" At most {MOST_FILES} updates of a run are read, spread evenly."
    )


def _series(own: Sequence[PositionMeans]) -> list[Series]:
    """The prompt first, then tools by name and results by number."""
    found = {series for one in own for series in one.moments}
    return sorted(
        found,
        key=lambda one: (one[0], one[1] != PROMPT, int(one[1]) if one[0] == BY_RESULTS else one[1]),
    )


def _points(own: Sequence[PositionMeans], series: Series) -> list[Point]:
    """Of one run over its trees; of several over the runs, at the positions that all with this
    series have."""
    if len(own) == 1:
        return own[0].points(series)
    return shared_points([{int(p.x): p.mean for p in one.points(series)} for one in own])


def _rows(
    group: Group, own: Sequence[PositionMeans], curves: Mapping[Series, Sequence[Point]]
) -> Iterator[tuple[Cell, ...]]:
    for series, points in curves.items():
        for p in points:
            held = [one.moments[series][int(p.x) - 1] for one in own if series in one.moments]
            steps, trees = sum(one.count for one in held), sum(one.num_trees for one in held)
            runs = sum(one.count > 0 for one in held)
            head = (group.panel, group.label, *series, int(p.x), steps, trees, runs)
            yield (*head, p.mean, p.low, p.high)


def _draw(axes: Sequence[Any], group: Group, curves: Mapping[Series, Sequence[Point]]) -> None:
    drawn = list[Point]()
    for one, by in zip(axes, (BY_TOOL, BY_RESULTS), strict=True):
        own = [(which, points) for (split, which), points in curves.items() if split == by]
        for look, (which, points) in zip(_LOOKS, own, strict=False):
            name = f"after {which}" if by == BY_TOOL else _number_of_results(which)
            draw_band(one, [p.x for p in points], points, printable(name, 30), looks(look))
            drawn += points
        one.set_xlabel("position in the step (token)")
        one.set_ylabel("entropy (nats)")
        one.legend(fontsize=7)
    for one in axes:
        fit_y(one, drawn)
    axes[0].set_title(printable(group.title, 40))


def _number_of_results(which: str) -> str:
    return f"after {PROMPT}" if which == "0" else f"{which} result{'s' * (which != '1')}"
