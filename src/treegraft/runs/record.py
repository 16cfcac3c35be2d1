"""The run folder: written, read back, and cut to a checkpoint when a run resumes.

    runs/NAME/
      config.json                       resolved settings
      metrics.jsonl                     one line per update
      trees/update-000012.jsonl         whole trees, one per line, advantages and ratios included
      trees/eval-000010-greedy.jsonl    the same of an evaluation
      checkpoints/update-000010/        a folder that transformers loads, and treegraft/ in it

Every file but metrics.jsonl is written whole under another name and then renamed, so that none is
ever half there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import IO, Any

from treegraft.core.errors import CheckpointError, DataError
from treegraft.core.files import append_line, write_atomically
from treegraft.core.types import (
    BranchCause,
    BranchDecision,
    BudgetState,
    Cause,
    ContinuationCause,
    EntropyKind,
    GraftCause,
    Leaf,
    Observation,
    Origin,
    StartCause,
    Status,
    Step,
    StepContent,
    StopReason,
    Task,
    ToolCall,
    Tree,
)

CAUSES: Mapping[str, type[Any]] = {
    "start": StartCause,
    "continuation": ContinuationCause,
    "branch": BranchCause,
    "graft": GraftCause,
}
SAMPLED_COLUMNS = ("sampling_logprobs", "entropies", "old_logprobs", "ratios")
"""Columns written for sampled tokens only."""
FILLERS = {"sampling_logprobs": 0.0, "entropies": 0.0, "old_logprobs": 0.0, "ratios": 1.0}


# ---------------------------------------------------------------------- trees


def tree_to_json(tree: Tree) -> str:
    """Returns a tree as one line; `tree_from_json` gives an equal tree back."""
    data = {
        "group_id": tree.group_id,
        "task": asdict(tree.task),
        "budget": asdict(tree.budget),
        "leaves": [asdict(leaf) for leaf in tree.leaves],
        "steps": [_step_to_dict(step) for step in tree.steps],
    }
    line = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    # Lone surrogates, which data sets may hold, exist in no encoding; escaped they do.
    return json.dumps(data, separators=(",", ":")) if re.search("[\ud800-\udfff]", line) else line


def _runs(values: Sequence[int]) -> list[list[int]]:
    """Run lengths: (1, 1, 1, 2) -> [[1, 3], [2, 1]]."""
    return [[int(value), len(list(group))] for value, group in groupby(values)]


def _step_to_dict(step: Step) -> dict[str, Any]:
    cause = step.cause
    data: dict[str, Any] = {
        "id": step.id,
        "parent": step.parent,
        "depth": step.depth,
        "token_ids": step.token_ids,
        "origins": _runs(step.origins),
        "loss_mask": _runs(step.loss_mask),
        "entropy_kind": step.entropy_kind,
        "temperature": step.temperature,
        "content": asdict(step.content),
        "stop_reason": step.stop_reason,
        "violation": step.violation,
        "policy_version": step.policy_version,
        "cause": None if cause is None else {"kind": _cause_kind(cause), **asdict(cause)},
        "decision": None if step.decision is None else asdict(step.decision),
        "lesson_ids": step.lesson_ids,
        "advantage": step.advantage,
    }
    mask = step.sampled_mask
    for name in SAMPLED_COLUMNS:
        column = getattr(step, name)
        data[name] = (
            None
            if column is None
            else [v for v, sampled in zip(column, mask, strict=True) if sampled]
        )
    return data


def _cause_kind(cause: Cause) -> str:
    return next(kind for kind, made in CAUSES.items() if type(cause) is made)


def tree_from_json(line: str) -> Tree:
    """Returns the tree that `tree_to_json` wrote."""
    data = json.loads(line)
    return Tree(
        task=Task(**{**data["task"], "reference": tuple(data["task"]["reference"])}),
        group_id=data["group_id"],
        budget=BudgetState(**data["budget"]),
        leaves=tuple(Leaf(**{**leaf, "status": Status(leaf["status"])}) for leaf in data["leaves"]),
        steps=tuple(_step_from_dict(step) for step in data["steps"]),
    )


def _step_from_dict(data: dict[str, Any]) -> Step:
    origins = tuple(Origin(value) for value, count in data.pop("origins") for _ in range(count))
    loss_mask = tuple(bool(value) for value, count in data.pop("loss_mask") for _ in range(count))
    columns: dict[str, tuple[float, ...] | None] = {}
    for name in SAMPLED_COLUMNS:
        values = data.pop(name)
        if values is not None and len(values) != origins.count(Origin.POLICY):
            raise ValueError(
                f"step '{data['id']}': {name} has {len(values)} entries for"
                f" {origins.count(Origin.POLICY)} sampled tokens"
            )
        rest = iter(values or ())
        filled = (next(rest) if origin is Origin.POLICY else FILLERS[name] for origin in origins)
        columns[name] = None if values is None else tuple(filled)
    content = data.pop("content")
    cause = data.pop("cause")
    decision = data.pop("decision", None)
    return Step(
        **{
            **data,
            **columns,
            "token_ids": tuple(data["token_ids"]),
            "lesson_ids": tuple(data.get("lesson_ids", ())),
            "origins": origins,
            "loss_mask": loss_mask,
            "entropy_kind": EntropyKind(data["entropy_kind"]),
            "stop_reason": None if data["stop_reason"] is None else StopReason(data["stop_reason"]),
            "content": StepContent(
                thought=content["thought"],
                calls=tuple(ToolCall(**call) for call in content["calls"]),
                observations=tuple(Observation(**seen) for seen in content["observations"]),
                answer=content["answer"],
            ),
            "cause": None if cause is None else CAUSES[cause.pop("kind")](**cause),
            "decision": (
                None
                if decision is None
                else BranchDecision(**{**decision, "seen": BranchCause(**decision["seen"])})
            ),
        }
    )


def write_trees(path: Path, trees: Iterable[Tree]) -> None:
    """Writes trees to `path`, one per line."""
    write_atomically(path, "".join(tree_to_json(tree) + "\n" for tree in trees))


def read_trees(path: Path | str) -> list[Tree]:
    """Returns the trees of a file, or of all `update-*.jsonl` files of a folder in order.

    Raises:
        DataError: no such file, or a line that is not a tree, by number.
    """
    place = Path(path)
    if place.is_dir():
        folder = place / "trees" if (place / "trees").is_dir() else place
        return [tree for file in sorted(folder.glob("update-*.jsonl")) for tree in read_trees(file)]
    if not place.exists():
        raise DataError(
            f"trees '{path}': there is no such file; expected a .jsonl file from a run's trees/"
            " folder"
        )
    trees = []
    with place.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                trees.append(tree_from_json(line.decode()))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise DataError(
                    f"trees '{path}', line {number}: not a recorded tree ({error!r})"
                ) from error
    return trees


# ---------------------------------------------------------------------- the folder


class RunFolder:
    """Paths and files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics_path = path / "metrics.jsonl"
        self.trees_dir = path / "trees"
        self.checkpoints_dir = path / "checkpoints"
        self._lock: IO[str] | None = None

    @classmethod
    def create(cls, path: Path, config_json: str) -> RunFolder:
        """Returns a new folder with the resolved settings in it.

        Raises:
            CheckpointError: the folder exists.
        """
        cls.refuse_existing(path)
        partial = path.with_name(f".{path.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        for folder in ("trees", "checkpoints"):
            (partial / folder).mkdir(parents=True)
        write_atomically(partial / "config.json", config_json)
        partial.replace(path)
        return cls(path)

    @staticmethod
    def refuse_existing(path: Path) -> None:
        """Raises CheckpointError where there is something at `path` already."""
        if path.exists():
            raise CheckpointError(
                f"run folder '{path}' exists; expected a new name. Choose another run.name, or"
                f" continue that run with: treegraft train --resume {path}"
            )

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Returns an existing folder.

        Raises:
            CheckpointError: it is not a run folder.
        """
        if not (path / "config.json").exists():
            raise CheckpointError(
                f"'{path}' is not a run folder: it has no config.json; expected what `treegraft"
                " train` made, e.g. runs/NAME"
            )
        return cls(path)

    def claim(self) -> None:
        """Keeps other processes off this run until `release` or the end of the process, however
        that comes.

        Raises:
            CheckpointError: another process is at work in it.
        """
        try:
            import fcntl
        except ImportError:  # not a Unix: no protection there
            return
        lock = (self.path / ".lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.close()
            raise CheckpointError(
                f"run folder '{self.path}': another process is at work in it; expected none. "
                "Wait for its end, or stop it with Ctrl-C."
            ) from error
        self._lock = lock

    def release(self) -> None:
        """Lets other processes work in this run."""
        if self._lock is not None:
            self._lock.close()

    def append_metrics(self, update: int, metrics: Mapping[str, float]) -> None:
        """Adds one line to metrics.jsonl."""
        line = json.dumps({"update": update, **dict(sorted(metrics.items()))})
        append_line(self.metrics_path, line)

    def metrics_size(self) -> int:
        """Returns the length of metrics.jsonl in bytes."""
        return self.metrics_path.stat().st_size if self.metrics_path.exists() else 0

    def trees_path(self, update: int, kind: str = "") -> Path:
        """Returns where the trees of an update go, or (kind "greedy", "sampled") those of an
        evaluation after it."""
        name = f"eval-{update:06d}-{kind}" if kind else f"update-{update:06d}"
        return self.trees_dir / f"{name}.jsonl"

    def cut_to(self, update: int, metrics_size: int) -> None:
        """Removes what was written after the checkpoint of `update`."""
        if self.metrics_size() < metrics_size:
            raise CheckpointError(
                f"run folder '{self.path}': metrics.jsonl has {self.metrics_size()} bytes, the"
                f" checkpoint of update {update} saw {metrics_size}; the file was changed or"
                " removed by hand. Put it back, or start a new run."
            )
        if self.metrics_path.exists():
            os.truncate(self.metrics_path, metrics_size)
        for file in self.trees_dir.glob("*.jsonl"):
            number = re.search(r"-(\d{6,})", file.name)
            if number and int(number.group(1)) > update:
                file.unlink()


def read_metrics(run_dir: Path | str) -> list[dict[str, float]]:
    """Returns the lines of a run's metrics.jsonl."""
    path = Path(run_dir) / "metrics.jsonl"
    if not path.exists():
        raise DataError(f"'{run_dir}' has no metrics.jsonl; expected a run folder")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
