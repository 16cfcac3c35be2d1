"""Two evaluations of the same items, item by item: the gain, its interval, and the items that
flipped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from treegraft import DataError, Tree
from treegraft.extras.suites.folder import EvalFolder
from treegraft.extras.suites.numbers import (
    Interval,
    Verdicts,
    correctness,
    item_means,
    main_measure,
    main_score,
)
from treegraft.extras.suites.sets import SETS
from treegraft.parts import errors


@dataclass(frozen=True, slots=True, kw_only=True)
class SetComparison:
    """One set in both evaluations."""

    name: str
    measure: str
    num_items: int
    before: float
    after: float
    gain: Interval
    """Mean difference with its 95 % paired bootstrap interval: items are drawn with both of their
    scores."""
    gained: list[str]
    """Ids of the items with more correct trajectories after."""
    lost: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two evaluations."""

    before: str
    after: str
    sets: list[SetComparison]
    gain: Interval
    """Unweighted mean over sets."""
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Returns plain JSON values."""
        return asdict(self)


def compare_evaluations(before: Path, after: Path) -> Comparison:
    """Returns the second evaluation against the first, over the sets that both hold.

    The judge's verdict counts if both were judged by the same model, else the rule.

    Raises:
        CheckpointError: one of them is no folder of an evaluation, or they hold no set in common.
        DataError: a set with other items, or one that is not finished.
    """
    folders = [EvalFolder(before), EvalFolder(after)]
    held = [folder.asked()["sets"] for folder in folders]
    # One of the two may have been extended by further sets since.
    common = [name for name in held[0] if name in held[1]]
    if not common:
        raise errors.CheckpointError(
            f"'{before}' holds {', '.join(held[0]) or 'no set'} and '{after}'"
            f" {', '.join(held[1]) or 'no set'}; expected a set that both hold.",
            code="no-common-set",
        )
    notes = []
    for folder, own in zip(folders, held, strict=True):
        if alone := [name for name in own if name not in common]:
            notes.append(f"only in {folder.path}: {', '.join(alone)}")
    models = [folder.judge_model() for folder in folders]
    is_judged = models[0] is not None and models[0] == models[1]
    if any(models) and not is_judged:
        # Two judges are no more comparable than a judge and a rule.
        notes.append("not judged by one model on both sides, so answers count by rule")
    verdicts: list[Verdicts | None] = [None, None]
    if is_judged:
        verdicts = [Verdicts(model=str(models[0]), by_key=one.verdicts()) for one in folders]
    compared = []
    differences = []
    for name in common:
        if held[0][name]["digest"] != held[1][name]["digest"]:
            raise DataError(
                f"set '{name}': '{before}' has {held[0][name]['num']} items and '{after}'"
                f" {held[1][name]['num']}, and they are not the same; expected one choice of items."
                " Evaluate both with the same --num, --shuffle-seed and source.",
                code="items-differ",
            )
        trees = [_finished(folder, name, held[0][name]["num"]) for folder in folders]
        one, gains = _compare_set(name, trees, verdicts)
        compared.append(one)
        differences.append(gains)
    gain = Interval.over(*differences)
    return Comparison(before=str(before), after=str(after), sets=compared, gain=gain, notes=notes)


def _finished(folder: EvalFolder, name: str, num: int) -> list[Tree]:
    trees = folder.trees(name)
    if len(trees) < num:
        raise DataError(
            f"'{folder.path}': {len(trees)} of the {num} items of '{name}' are done; expected all. "
            "Let that evaluation finish first.",
            code="evaluation-unfinished",
        )
    # By id, so that both sides pair up: in a folder they are in the order of their ends.
    return [trees[key] for key in sorted(trees)]


def _compare_set(
    name: str, trees: Sequence[Sequence[Tree]], verdicts: Sequence[Verdicts | None]
) -> tuple[SetComparison, list[float]]:
    # Both sides have verdicts, or none has.
    measure = main_measure(SETS[name], verdicts[0])
    before, after = (
        item_means(own, main_score(measure, said))
        for own, said in zip(trees, verdicts, strict=True)
    )
    # Items flip by correctness, also where the score is F1.
    shares_before, shares_after = (
        item_means(own, correctness(measure, said))
        for own, said in zip(trees, verdicts, strict=True)
    )
    gains = [b - a for a, b in zip(before, after, strict=True)]
    gained = []
    lost = []
    for tree, first, second in zip(trees[0], shares_before, shares_after, strict=True):
        if second > first:
            gained.append(tree.task.id)
        if second < first:
            lost.append(tree.task.id)
    compared = SetComparison(
        name=name,
        measure=measure,
        num_items=len(gains),
        before=fmean(before),
        after=fmean(after),
        gain=Interval.over(gains),
        gained=gained,
        lost=lost,
    )
    return compared, gains
