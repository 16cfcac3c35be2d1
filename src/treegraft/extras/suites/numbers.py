"""From recorded trees and verdicts to the numbers of an evaluation."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from treegraft import Status, Trajectory, Tree
from treegraft.extras.suites.judge import Verdict, verdict_key
from treegraft.extras.suites.sets import GROUPS, MEASURES, EvalSet, SetRule
from treegraft.parts import measuring


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its 95 % bootstrap interval: Interval(mean=0.41, low=0.35, high=0.47)"""

    mean: float
    low: float
    high: float

    @classmethod
    def over(cls, *groups: Sequence[float]) -> Interval:
        """Returns the unweighted mean of the groups' means, items resampled within each group.

        A group has one number for each item, the mean over its samples, because another test set
        would have other items.
        """
        # Loaded where numbers are computed: scipy needs a second.
        from treegraft.extras.statistics import mean_of_means

        mean, ends = mean_of_means(groups)
        return cls(mean, *ends)

    @classmethod
    def of_scores(cls, values: Sequence[float]) -> Interval:
        """Returns the same of scores from 0 to 1. If all are 0 or all 1, resampled items have no
        spread: then it is Wilson's interval of a share."""
        from treegraft.extras.statistics import wilson

        found = cls.over(values)
        if {*values} in ({0.0}, {1.0}):
            # An interval of no width would claim that all further items end the same.
            return cls(found.mean, *wilson(found.mean, len(values)))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """The judge's verdicts: Verdicts(model="Qwen2.5-72B", by_key={"1f0c...": "correct"})"""

    model: str
    by_key: Mapping[str, str]

    def of(self, path: Trajectory) -> str | None:
        """Returns the verdict on a trajectory; None without an answer or a verdict."""
        if (answer := measuring.answer_of(path)) is None:
            return None
        return self.by_key.get(verdict_key(self.model, path.task, answer))


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelNumbers:
    """The main score of one level: LevelNumbers(num_items=39, score=Interval(0.2, 0.1, 0.3))"""

    num_items: int
    score: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class SetNumbers:
    """The numbers of one set. Shares are of all trajectories: one without an answer, failed or not,
    scores 0."""

    name: str
    source: str
    measure: str
    """The measure of `score`: "match", "f1" or "judge"."""
    num_items: int
    num_samples: int
    """Trajectories per item."""
    num_completed: int
    num_truncated: int
    """Out of tokens, steps or tool calls."""
    num_violations: int
    """Ended outside the format."""
    num_failed: int
    """Lost to failures of ours."""
    score: Interval
    """Mean of the measure with its 95 % bootstrap interval over items."""
    score_completed: float | None
    """The same over completed trajectories alone; None without one."""
    em: float
    """SQuAD's exact match."""
    f1: float
    """SQuAD's F1, each Chinese character a word."""
    match: float
    """Exact match or equal mathematics, by rule."""
    judge: float | None = None
    """Share that the judge calls correct; None without a judge."""
    num_judged: int = 0
    """Answers with a verdict, those that could not be read included."""
    num_unparsed: int = 0
    """Replies of the judge that were no verdict; they count as not correct."""
    num_disagreements: int = 0
    """Trajectories that the judge calls correct and the rule does not, or the other way round."""
    pass_at: dict[int, float] = field(default_factory=dict)
    """k -> unbiased pass@k, by the judge where `measure` is the judge's and by rule elsewhere."""
    tool_calls_mean: float
    tool_calls: dict[str, float] = field(default_factory=dict)
    """Mean calls of a trajectory, by tool."""
    sampled_tokens_mean: float
    correct_per_call: float | None
    """Correct trajectories per tool call; None without a call."""
    levels: dict[str, LevelNumbers] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteNumbers:
    """All numbers of an evaluation."""

    checkpoint: str
    temperature: float
    num_samples: int
    seed: int
    judge_model: str | None
    sets: list[SetNumbers]
    mean: Interval
    """Unweighted mean of the sets' scores."""
    groups: dict[str, Interval]
    """The same of each group of `sets.GROUPS` whose sets are all here, in the measures of its
    paper, unless it is all there is and says the same."""
    is_complete: bool
    """Every item of every set has been run."""

    def as_dict(self) -> dict[str, Any]:
        """Returns plain JSON values."""
        return asdict(self)


def correctness(measure: str, verdicts: Verdicts | None) -> Callable[[Trajectory], bool]:
    """Returns the test of a trajectory's correctness: the judge's verdict where it is the measure,
    else the rule."""
    if measure == "judge" and verdicts is not None:
        # An answer without a readable verdict counts as not correct.
        return lambda path: verdicts.of(path) == Verdict.CORRECT
    return lambda path: bool(path.leaf.is_correct)


def main_measure(rule: SetRule, verdicts: Verdicts | None, group_measure: str = "") -> str:
    """Returns "f1", "judge", or "match" where the set is mathematics or nobody judges.

    Args:
        group_measure: of the set in a paper's group; empty for the set's own.
    """
    # RAPO and ARPO measure some sets differently.
    measure = group_measure or rule.measure
    # Equal mathematics is decided by rule, with or without a judge.
    return "match" if measure == "math" or (measure == "judge" and verdicts is None) else measure


def main_score(measure: str, verdicts: Verdicts | None) -> Callable[[Trajectory], float]:
    """Returns the main score of a trajectory, 0..1."""
    if measure == "f1":
        # A failed trajectory has no parts, and counts as wrong.
        return lambda path: path.leaf.reward_parts.get("f1", 0.0)
    is_correct = correctness(measure, verdicts)
    return lambda path: float(is_correct(path))


def item_means(trees: Sequence[Tree], score: Callable[[Trajectory], float]) -> list[float]:
    """Returns one number per tree: the mean over its trajectories."""
    found = []
    for tree in trees:
        found.append(fmean(map(score, tree.trajectories())))
    return found


PASS_KS = (1, 2, 3, 4, 5, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""The k of pass@k: 1, 3, 5 as in the papers, and powers of two."""


def set_numbers(one: EvalSet, trees: Sequence[Tree], verdicts: Verdicts | None) -> SetNumbers:
    """Returns the numbers of a set.

    Raises:
        ValueError: no trees.
    """
    measure = main_measure(one.rule, verdicts)
    score = main_score(measure, verdicts)
    is_correct = correctness(measure, verdicts)
    paths = []
    counts = []
    for tree in trees:
        paths += tree.trajectories()
        counts.append((len(tree.leaves), sum(map(is_correct, tree.trajectories()))))
    status = Counter(path.status for path in paths)
    completed = []
    for path in paths:
        if path.status is Status.COMPLETED:
            completed.append(score(path))
    # pass@k needs k samples of every item.
    num_samples = min(num for num, _ in counts)
    pass_at = {}
    for k in PASS_KS[: bisect.bisect(PASS_KS, num_samples)]:
        pass_at[k] = fmean(measuring.pass_at_k(num, right, k) for num, right in counts)
    calls: Counter[str] = Counter()
    for path in paths:
        for content in path.contents:
            # Calls without a result were not run.
            calls.update(call.name for call in content.calls[: len(content.observations)])
    num_calls = sum(path.num_tool_calls for path in paths)
    parts: dict[str, Any] = {}
    for name in ("em", "f1", "match"):
        parts[name] = fmean(path.leaf.reward_parts.get(name, 0.0) for path in paths)
    return SetNumbers(
        name=one.name,
        source=one.source,
        measure=measure,
        num_items=len(trees),
        num_samples=num_samples,
        num_completed=status[Status.COMPLETED],
        num_truncated=status[Status.TRUNCATED],
        num_violations=status[Status.FORMAT_VIOLATION],
        num_failed=status[Status.FAILED],
        score=Interval.of_scores(item_means(trees, score)),
        score_completed=fmean(completed) if completed else None,
        **parts,
        pass_at=pass_at,
        tool_calls_mean=num_calls / len(paths),
        tool_calls={name: count / len(paths) for name, count in sorted(calls.items())},
        sampled_tokens_mean=fmean(sum(step.num_sampled for step in path.steps) for path in paths),
        # Of all calls, those of wrong trajectories too.
        correct_per_call=sum(right for _, right in counts) / num_calls if num_calls else None,
        levels=_levels(trees, score),
        notes=list(one.notes),
        **(_judged(paths, verdicts) if verdicts is not None else {}),
    )


def _levels(trees: Sequence[Tree], score: Callable[[Trajectory], float]) -> dict[str, LevelNumbers]:
    by_level: dict[str, list[Tree]] = {}
    for tree in trees:
        if tree.task.category:
            by_level.setdefault(tree.task.category, []).append(tree)
    found = {}
    for level, members in sorted(by_level.items()):
        own = Interval.of_scores(item_means(members, score))
        found[level] = LevelNumbers(num_items=len(members), score=own)
    return found


def _judged(paths: Sequence[Trajectory], verdicts: Verdicts) -> dict[str, Any]:
    said = Counter(verdicts.of(path) for path in paths)
    num_judged = len(paths) - said[None]
    num_differ = 0
    for path in paths:
        verdict = verdicts.of(path)
        # A reply that could not be read agrees with nobody, so it is no disagreement either.
        opposite = Verdict.INCORRECT if path.leaf.is_correct else Verdict.CORRECT
        num_differ += verdict == opposite
    return {
        "judge": said[Verdict.CORRECT] / len(paths),
        "num_judged": num_judged,
        "num_unparsed": said[Verdict.UNPARSED],
        "num_disagreements": num_differ,
    }


def suite_numbers(
    sets: Sequence[EvalSet],
    trees: Mapping[str, Sequence[Tree]],
    verdicts: Verdicts | None,
    *,
    checkpoint: str,
    temperature: float,
    num_samples: int,
    seed: int,
) -> SuiteNumbers:
    """Returns the numbers of all sets that have any tree.

    Raises:
        ValueError: none has.
    """
    # A stop may have come before the first item of a set.
    begun = {one.name: one for one in sets if trees[one.name]}

    def mean(names: Iterable[str], group: str = "") -> Interval:
        own = MEASURES.get(group, {})
        scores = []
        for name in names:
            measure = main_measure(begun[name].rule, verdicts, own.get(name, ""))
            # Item by item: sets weigh alike in the mean, however many items they have.
            scores.append(item_means(trees[name], main_score(measure, verdicts)))
        return Interval.over(*scores)

    groups = {}
    for group, names in GROUPS.items():
        # One that is all there is says the same as the mean, unless it has other measures.
        if {*names} < begun.keys() or ({*names} == begun.keys() and group in MEASURES):
            groups[group] = mean(names, group)
    return SuiteNumbers(
        checkpoint=checkpoint,
        temperature=temperature,
        num_samples=num_samples,
        seed=seed,
        judge_model=None if verdicts is None else verdicts.model,
        sets=[set_numbers(one, trees[one.name], verdicts) for one in begun.values()],
        mean=mean(begun),
        groups=groups,
        is_complete=all(len(trees[one.name]) == len(one.tasks) for one in sets),
    )
