"""Two evaluations of the same items, item by item: how much better, how sure, and which items
flipped."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from treegraft.core.errors import CheckpointError, DataError
from treegraft.core.types import Trajectory, Tree
from treegraft.evals.folder import EvalFolder
from treegraft.evals.numbers import Verdicts, correctness, item_means, main_score
from treegraft.evals.scores import Interval, answer_of, bootstrap, stratified_bootstrap
from treegraft.evals.suites import SETS


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
        raise CheckpointError(
            f"'{before}' holds {', '.join(held[0]) or 'no set'} and '{after}'"
            f" {', '.join(held[1]) or 'no set'}; expected a set that both hold."
        )
    verdicts = [_verdicts(folder) for folder in folders]
    notes = [
        f"only in {folder.path}: {', '.join(alone)}"
        for folder, own in zip(folders, held, strict=True)
        if (alone := [name for name in own if name not in common])
    ]
    is_judged = (
        verdicts[0] is not None
        and verdicts[1] is not None
        and verdicts[0].model == verdicts[1].model
    )
    if not is_judged and any(one is not None for one in verdicts):
        notes.append("not judged by one model on both sides, so answers count by rule")
    compared, differences = [], []
    for name in common:
        if held[0][name]["digest"] != held[1][name]["digest"]:
            raise DataError(
                f"set '{name}': '{before}' has {held[0][name]['num']} items and '{after}'"
                f" {held[1][name]['num']}, and they are not the same; expected one choice of items."
                " Evaluate both with the same --num, --shuffle-seed and source."
            )
        trees = [_finished(folder, name, held[0][name]["num"]) for folder in folders]
        one, values = _compare_set(name, trees, verdicts if is_judged else [None, None])
        compared.append(one)
        differences.append(values)
    return Comparison(
        before=str(before),
        after=str(after),
        sets=compared,
        gain=stratified_bootstrap(differences),
        notes=notes,
    )


def _verdicts(folder: EvalFolder) -> Verdicts | None:
    """The verdicts of the judge that the folder's report was made with."""
    import json

    if not folder.report_path.exists():
        return None
    model = json.loads(folder.report_path.read_text(encoding="utf-8")).get("judge_model")
    return None if model is None else Verdicts(model=model, by_key=folder.verdicts())


def _finished(folder: EvalFolder, name: str, num: int) -> list[Tree]:
    trees = folder.trees(name)
    if len(trees) < num:
        raise DataError(
            f"'{folder.path}': {len(trees)} of the {num} items of '{name}' are done; expected all. "
            "Let that evaluation finish first."
        )
    return [trees[key] for key in sorted(trees)]


def _compare_set(
    name: str, trees: Sequence[Sequence[Tree]], verdicts: Sequence[Verdicts | None]
) -> tuple[SetComparison, list[float]]:
    kind = SETS[name].measure
    measure = (
        "f1"
        if kind == "f1"
        else "judge"
        if kind == "judge" and verdicts[0] is not None
        else "match"
    )
    before, after = (
        item_means(own, main_score(measure, one)) for own, one in zip(trees, verdicts, strict=True)
    )
    differences = [b - a for a, b in zip(before, after, strict=True)]
    shares = [
        {tree.task.id: _share(tree, correctness(measure, one)) for tree in own}
        for own, one in zip(trees, verdicts, strict=True)
    ]
    by_id: list[Mapping[str, Tree]] = [{tree.task.id: tree for tree in own} for own in trees]
    flips = [
        _flip(by_id[0][key], by_id[1][key], shares[0][key], shares[1][key]) for key in shares[0]
    ]
    return (
        SetComparison(
            name=name,
            measure=measure,
            num_items=len(differences),
            before=statistics.fmean(before),
            after=statistics.fmean(after),
            gain=bootstrap(differences),
            gained=[flip for flip in flips if flip.after > flip.before],
            lost=[flip for flip in flips if flip.after < flip.before],
        ),
        differences,
    )


def _share(tree: Tree, is_correct: Callable[[Trajectory], bool]) -> float:
    return statistics.fmean(is_correct(path) for path in tree.trajectories())


def _flip(before: Tree, after: Tree, share_before: float, share_after: float) -> Flip:
    return Flip(
        task_id=before.task.id,
        question=before.task.question,
        reference=before.task.reference,
        before=share_before,
        after=share_after,
        answer_before=answer_of(before.trajectories()[0]),
        answer_after=answer_of(after.trajectories()[0]),
    )
