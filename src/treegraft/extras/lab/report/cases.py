"""Case studies: what several runs, or one run at several updates, did with the same held-out
questions, side by side on one page that needs neither a server nor the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from treegraft import DataError, SettingError, Status
from treegraft.parts import Leaf, RunReader, files, standalone_page

PAGE = "cases.html"
MOST_SIDES = 4
"""Trajectories that a window has room for beside each other."""
EVALUATIONS = ("greedy", "sampled", "eval")
"""Kinds of evaluations: the first that all sides have is compared, unless one is chosen."""

Key = tuple[str, str, tuple[str, ...]]
"""Id, question and reference: runs with other seeds may ask other questions by one id."""
Pattern = tuple[bool, ...]
"""For each side whether it was right."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a side did on a question: Verdict(number=7, num_right=1, num_judged=1)"""

    number: int
    """Of the tree in its file."""
    num_right: int
    num_judged: int
    """Trajectories with a verdict; those lost to failures of ours have none."""

    @property
    def is_right(self) -> bool:
        """Whether most of its trajectories are right; an equal split counts as wrong."""
        return 2 * self.num_right > self.num_judged


@dataclass(frozen=True, slots=True)
class Side:
    """One evaluation of a run."""

    label: str
    run: RunReader
    file: Any
    """One of `run.files()`."""
    verdicts: Mapping[Key, Verdict | None]
    """In the order of the held-out set; None where nothing judges its trajectories."""


@dataclass(frozen=True, slots=True)
class Cases:
    """The questions that sides have in common, and those chosen."""

    sides: Sequence[Side]
    counts: Mapping[Pattern, int]
    """Questions by who was right, those where nobody was included; all kinds, also empty ones."""
    chosen: Sequence[tuple[Pattern, Key]]
    notes: Sequence[str]
    """Questions that are not counted, and why."""

    def words(self, pattern: Pattern) -> str:
        """Returns who was right: "both right", "only A right", "A and C right", "neither right"."""
        right = [side.label for side, is_right in zip(self.sides, pattern, strict=True) if is_right]
        if not right:
            return "neither right" if len(pattern) == 2 else "none right"
        if all(pattern):
            return "both right" if len(pattern) == 2 else "all right"
        return f"only {right[0]} right" if len(right) == 1 else f"{' and '.join(right)} right"

    @property
    def num_different(self) -> int:
        """Questions on which the sides differ."""
        return sum(count for pattern, count in self.counts.items() if len({*pattern}) > 1)

    @property
    def summary(self) -> str:
        """Returns a line: questions shown, those that differ, and the number of each kind."""
        kinds = "; ".join(f"{self.words(kind)}: {count}" for kind, count in self.counts.items())
        return f"{len(self.chosen)} of {self.num_different} questions that differ ({kinds})"


def compare(
    named: Sequence[tuple[str | None, Path]],
    num: int,
    at: Sequence[int] = (),
    *,
    kinds: Sequence[str] = EVALUATIONS,
) -> Cases:
    """Returns the questions on which evaluations differ most: at most `num` of those that one side
    and not all got right.

    Each kind of difference takes its turn, those with one side right first, each in the order of
    the held-out set, so that neither a side nor a question is preferred.

    Args:
        named: run folders with their labels; None takes the run's name.
        at: updates whose evaluations are compared, of each run; empty for the last one, or for
            the first and the last of a single run.
        kinds: evaluations that may be compared: the first kind that all sides have is.

    Raises:
        SettingError: a study, or more or fewer evaluations than one page can compare.
        CheckpointError: a path is no run folder.
        DataError: an evaluation that is not there, or sides without a common question.
    """
    sides = _sides(named, at, kinds)
    shared = [key for key in sides[0].verdicts if all(key in one.verdicts for one in sides[1:])]
    found: dict[Pattern, list[Key]] = {
        kind: [] for kind in sorted(product((True, False), repeat=len(sides)), key=_order)
    }
    for key in shared:
        verdicts = [side.verdicts[key] for side in sides]
        judged = [one for one in verdicts if one is not None]
        if len(judged) == len(sides):
            found[tuple(one.is_right for one in judged)].append(key)
    notes = []
    if alone := len({key for side in sides for key in side.verdicts}) - len(shared):
        notes.append(f"Not counted: {alone} questions that not all of them were asked.")
    if unjudged := len(shared) - sum(map(len, found.values())):
        notes.append(
            f"Not counted: {unjudged} questions without a verdict, for want of a reference or by a"
            " failure outside the agent."
        )
    if not any(found.values()):
        names = " and ".join(f"{side.label} ({side.file.name})" for side in sides)
        raise DataError(
            f"--cases: {names} have no judged question in common; expected evaluations on the same"
            f" held-out tasks. {' '.join(notes)} Runs with another tasks.* or run.seed may have"
            " other questions.",
            code="no-common-question",
        )
    counts = {kind: len(keys) for kind, keys in found.items()}
    return Cases(sides, counts, _in_turn(found, num), notes)


def _order(kind: Pattern) -> tuple[bool, int, list[bool]]:
    # Differences before agreement, few right before many, the first side before the others.
    return len({*kind}) == 1, sum(kind), [not one for one in kind]


def _in_turn(found: Mapping[Pattern, Sequence[Key]], num: int) -> list[tuple[Pattern, Key]]:
    """One question of each kind of difference after the other, until there are `num`."""
    kinds = {kind: keys for kind, keys in found.items() if len({*kind}) > 1}
    longest = max(map(len, kinds.values()), default=0)
    turns = [
        (kind, keys[turn])
        for turn in range(longest)
        for kind, keys in kinds.items()
        if turn < len(keys)
    ]
    return turns[:num]


# ---------------------------------------------------------------------- what is compared


def _sides(
    named: Sequence[tuple[str | None, Path]], at: Sequence[int], kinds: Sequence[str]
) -> list[Side]:
    if studies := [path for _, path in named if path.is_file()]:
        raise SettingError(
            f"--cases: '{studies[0]}' is a study, whose lines hold no trajectories; expected run"
            ' folders, which `treegraft study` keeps with keep = "all"',
            code="cases-of-study",
        )
    # A run that is given twice counts once, as in the report.
    once = {path.resolve(): (label, path) for label, path in named}
    runs = [(label, RunReader(path)) for label, path in once.values()]
    kind = _kind([run for _, run in runs], kinds)
    chosen = [
        (label, run, file) for label, run in runs for file in _files(run, kind, at, len(runs))
    ]
    names = [run.name for _, run, _ in chosen]
    if not 2 <= len(chosen) <= MOST_SIDES:
        raise SettingError(
            f"--cases: got {len(chosen)} evaluations of {', '.join(dict.fromkeys(names))};"
            f" expected 2 to {MOST_SIDES}. Name two runs, or one with two evaluations; --at UPDATE"
            " chooses them",
            code="cases-number",
        )
    return [
        Side(label, run, file, _verdicts(run, file))
        for label, (_, run, file) in zip(_labels(chosen), chosen, strict=True)
    ]


def _labels(chosen: Sequence[tuple[str | None, RunReader, Any]]) -> list[str]:
    """What tells the sides apart: the label or the run's name, with the update where that is not
    enough, else with a number."""
    names = [label or run.name for label, run, _ in chosen]
    updates = [f"{name}, update {one[2].update}" for name, one in zip(names, chosen, strict=True)]
    numbers = [f"{name} ({number})" for number, name in enumerate(names, start=1)]
    return next(one for one in (names, updates, numbers) if len({*one}) == len(one))


def _kind(runs: Sequence[RunReader], kinds: Sequence[str]) -> str:
    """The first of these kinds of evaluation that all runs have."""
    held = [{file.kind for file in run.files()} for run in runs]
    for kind in kinds:
        if all(kind in one for one in held):
            return kind
    said = "; ".join(
        f"{run.name}: {', '.join(sorted(one - {'update'})) or 'none'}"
        for run, one in zip(runs, held, strict=True)
    )
    raise DataError(
        f"--cases: the runs recorded no evaluation of one kind ({said}); expected"
        f" {' or '.join(kinds)} ones of all. eval.every, eval.at_end and track.record_trees have"
        " them recorded",
        code="evaluations-differ",
    )


def _files(run: RunReader, kind: str, at: Sequence[int], num_runs: int) -> list[Any]:
    held = {file.update: file for file in run.files() if file.kind == kind}
    if missing := [update for update in at if update not in held]:
        raise DataError(
            f"--at {missing[0]}: run '{run.name}' has no {kind} evaluation there; there are:"
            f" {', '.join(map(str, held))}",
            code="evaluation-missing",
        )
    ends = [max(held)] if num_runs > 1 else [min(held), max(held)]
    return [held[update] for update in dict.fromkeys(at or ends)]


def _verdicts(run: RunReader, file: Any) -> dict[Key, Verdict | None]:
    found: dict[Key, Verdict | None] = {}
    for number in range(run.num_trees(file.name)):
        tree = run.tree(file.name, number)
        judged = [leaf for leaf in tree.leaves if _is_judged(leaf)]
        right = sum(bool(leaf.is_correct) for leaf in judged)
        task = tree.task
        found[task.id, task.question, task.reference] = (
            Verdict(number, right, len(judged)) if judged else None
        )
    return found


def _is_judged(leaf: Leaf) -> bool:
    return leaf.status is not Status.FAILED and leaf.is_correct is not None


# ---------------------------------------------------------------------- the page


def write_cases(cases: Cases, path: Path) -> None:
    """Writes the page."""
    title = f"Case studies: {' and '.join(side.label for side in cases.sides)}"
    data = {
        "title": title,
        "sides": [
            {
                "label": side.label,
                "run": side.run.name,
                "update": side.file.update,
                "kind": side.file.kind,
            }
            for side in cases.sides
        ],
        "kinds": [
            {"words": cases.words(kind), "num": count} for kind, count in cases.counts.items()
        ],
        "num_different": cases.num_different,
        "notes": cases.notes,
        "cases": [
            {"words": cases.words(kind)} | _case([_shown(side, key) for side in cases.sides], key)
            for kind, key in cases.chosen
        ],
    }
    script = Path(__file__).with_name("cases.js").read_text(encoding="utf-8")
    files.write_atomically(path, standalone_page(title, script, data))


def _case(sides: Sequence[dict[str, Any]], key: Key) -> dict[str, Any]:
    task_id, question, reference = key
    task = {"id": task_id, "question": question, "reference": reference}
    return {"task": task, "sides": sides}


def _shown(side: Side, key: Key) -> dict[str, Any]:
    """One trajectory of a side: of several the first that came out as most did."""
    verdict = side.verdicts[key]
    assert verdict is not None
    tree = side.run.tree(side.file.name, verdict.number)
    number = next(
        n
        for n, leaf in enumerate(tree.leaves)
        if _is_judged(leaf) and bool(leaf.is_correct) is verdict.is_right
    )
    drawn = side.run.drawn(side.file.name, verdict.number)
    path = {step.id for step in tree.trajectories()[number].steps}
    return {
        "num_right": verdict.num_right,
        "num_judged": verdict.num_judged,
        "leaf": number,
        "leaves": drawn["leaves"],
        "peers": drawn["peers"],
        # The question stands above all sides.
        "steps": [step for step in drawn["steps"][1:] if step["id"] in path],
    }
