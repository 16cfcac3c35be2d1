"""Two evaluations of the same items, item by item: the gain, its interval, and the items that
flipped."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from treegraft import DataError, Tree
from treegraft.extras.suites.folder import EvalFolder
from treegraft.extras.suites.numbers import (
    Verdicts,
    correctness,
    item_means,
    main_measure,
    main_score,
)
from treegraft.extras.suites.scores import Interval, bootstrap, stratified_bootstrap
from treegraft.extras.suites.sets import SETS
from treegraft.parts import errors, measuring


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """An item whose share of correct trajectories differs: Flip(task_id="gsm8k/7", question="...",
    before=0.0, after=1.0, ...)"""

    task_id: str
    question: str
    reference: tuple[str, ...]
    before: float
    after: float
    answer_before: str | None
    """Of the first trajectory; None without one."""
    answer_after: str | None


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
    gained: list[Flip]
    """Items with more correct trajectories after."""
    lost: list[Flip]


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

    The judge's verdict counts where both were judged by the same model, else the rule.

    Raises:
        CheckpointError: one of them is no folder of an evaluation, or they hold no set in common.
        DataError: a set with other items, or one that is not finished.
    """
    folders = [EvalFolder(before), EvalFolder(after)]
    held = [folder.asked()["sets"] for folder in folders]
    common = [name for name in held[0] if name in held[1]]
    if not common:
        raise errors.CheckpointError(
            f"'{before}' holds {', '.join(held[0]) or 'no set'} and '{after}'"
            f" {', '.join(held[1]) or 'no set'}; expected a set that both hold.",
            code="no-common-set",
        )
    verdicts = [_verdicts(folder) for folder in folders]
    notes = [
        f"only in {folder.path}: {', '.join(alone)}"
        for folder, own in zip(folders, held, strict=True)
        if (alone := [name for name in own if name not in common])
    ]
    models = [None if one is None else one.model for one in verdicts]
    if models[0] is None or models[0] != models[1]:
        # Two judges are no more comparable than a judge and a rule.
        verdicts = [None, None]
        if any(models):
            notes.append("not judged by one model on both sides, so answers count by rule")
    compared, differences = [], []
    for name in common:
        if held[0][name]["digest"] != held[1][name]["digest"]:
            raise DataError(
                f"set '{name}': '{before}' has {held[0][name]['num']} items and '{after}'"
                f" {held[1][name]['num']}, and they are not the same; expected one choice of items."
                " Evaluate both with the same --num, --shuffle-seed and source.",
                code="items-differ",
            )
        trees = [_finished(folder, name, held[0][name]["num"]) for folder in folders]
        one, values = _compare_set(name, trees, verdicts)
        compared.append(one)
        differences.append(values)
    gain = stratified_bootstrap(differences)
    return Comparison(before=str(before), after=str(after), sets=compared, gain=gain, notes=notes)


def _verdicts(folder: EvalFolder) -> Verdicts | None:
    """Returns the judge's verdicts that the folder's report was made with."""
    model = folder.judge_model()
    return None if model is None else Verdicts(model=model, by_key=folder.verdicts())


def _finished(folder: EvalFolder, name: str, num: int) -> list[Tree]:
    trees = folder.trees(name)
    if len(trees) < num:
        raise DataError(
            f"'{folder.path}': {len(trees)} of the {num} items of '{name}' are done; expected all. "
            "Let that evaluation finish first.",
            code="evaluation-unfinished",
        )
    # By id, so that both sides pair up: each folder holds them in the order of their ends.
    return [trees[key] for key in sorted(trees)]


def _compare_set(
    name: str, trees: Sequence[Sequence[Tree]], verdicts: Sequence[Verdicts | None]
) -> tuple[SetComparison, list[float]]:
    measure = main_measure(SETS[name], verdicts[0])
    sides = list(zip(trees, verdicts, strict=True))
    before, after = (item_means(own, main_score(measure, one)) for own, one in sides)
    shares = [item_means(own, correctness(measure, one)) for own, one in sides]
    differences = [b - a for a, b in zip(before, after, strict=True)]
    flips = [
        Flip(
            task_id=old.task.id,
            question=old.task.question,
            reference=old.task.reference,
            before=share_before,
            after=share_after,
            answer_before=measuring.answer_of(old.trajectories()[0]),
            answer_after=measuring.answer_of(new.trajectories()[0]),
        )
        for old, new, share_before, share_after in zip(*trees, *shares, strict=True)
    ]
    compared = SetComparison(
        name=name,
        measure=measure,
        num_items=len(differences),
        before=statistics.fmean(before),
        after=statistics.fmean(after),
        gain=bootstrap(differences),
        gained=[flip for flip in flips if flip.after > flip.before],
        lost=[flip for flip in flips if flip.after < flip.before],
    )
    return compared, differences
