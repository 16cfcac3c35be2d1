"""What lies beside a checkpoint and a resumed run depends on: metrics so far, the evaluation before
the first update, trees to be replayed, the reference of the KL term, the Step-Trace Buffer, the
tasks.

A checkpoint holds a checksum of each, by its path in the run folder, so that nothing of it changes
unseen between the end of one process and the start of the next.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treegraft.core.errors import CheckpointError, SettingError
from treegraft.core.files import file_checksum
from treegraft.core.types import Task
from treegraft.runs.checkpoint import (
    ACCEPT,
    DamagedCheckpoint,
    TrainState,
    in_order,
    read_state,
    whole_state,
)
from treegraft.runs.tree_files import TreePart, parts_in
from treegraft.settings.config import Config, settings_with
from treegraft.settings.load import differences, load_config

METRICS = "metrics.jsonl"
_REFERENCE = "reference/*.safetensors"
_REPLAYED = "trees/update-"


def tasks_checksum(*sets: Sequence[Task]) -> str:
    """Returns a checksum of sets of tasks; of objects in their columns their types count alone,
    since the texts of some differ from process to process."""
    digest = hashlib.blake2b(digest_size=16)
    for number, tasks in enumerate(sets):
        for one in tasks:
            facts = (number, one.id, one.question, one.reference, one.category, one.messages)
            text = json.dumps([*facts, one.columns], skipkeys=True, default=lambda x: str(type(x)))
            digest.update(text.encode())
    return digest.hexdigest()


class ResumeInputs:
    """The checksums of a run folder. What has not changed is read once."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._known: dict[Any, str] = {}

    def checksums(self, state: TrainState, replayed: Iterable[str] = ()) -> dict[str, str]:
        """Returns the checksum of each thing but the buffer; of metrics.jsonl that of the beginning
        that the state has seen.

        Args:
            replayed: `Replay.labels`.
        """
        # Before, what is there was left by a process that was killed, and is written again.
        is_begun, wanted = state.is_closed or state.update > 0, {*replayed}
        files = self._run_dir.glob(_REFERENCE) if is_begun else ()
        found = {one.relative_to(self._run_dir).as_posix(): self._checksum(one) for one in files}
        for part in parts_in(self._run_dir / "trees"):
            is_start = part.update == 0 and part.kind != "update" and is_begun
            if is_start or part.label in wanted:
                found[part.label] = self._sum(part)
        if state.metrics_size:
            found[METRICS] = file_checksum(self._run_dir / METRICS, state.metrics_size)
        return dict(sorted(found.items()))

    def _checksum(self, path: Path) -> str:
        facts = path.stat()
        key = (path, facts.st_size, facts.st_mtime_ns)
        if key not in self._known:
            self._known[key] = file_checksum(path)
        return self._known[key]

    def _sum(self, part: TreePart) -> str:
        # Not by its file, which grows with each update.
        if part.key not in self._known:
            self._known[part.key] = part.sum_here()
        return self._known[part.key]


def refuse_other_settings(run_dir: Path, own: Config, checkpoint: Path) -> None:
    """Raises CheckpointError where the run's config.json no longer says what its checkpoint was
    trained with."""
    place = checkpoint / "treegraft" / "config.json"
    try:
        trained = load_config(place)
    except SettingError as error:
        raise CheckpointError(
            f"checkpoint '{checkpoint}': its settings could not be read ({error}); another version"
            " of Treegraft wrote it. Resume it with that one.",
            code="checkpoint-settings",
        ) from error
    # Names are labels, and a resume may have changed the others since.
    free = ("run.name", "run.dir", *settings_with("resumable"))
    changed = [one for one in differences(trained, own) if not one.startswith(free)]
    if changed:
        raise CheckpointError(
            f"run folder '{run_dir}': config.json was changed by hand: {'; '.join(changed)}"
            f" (was: in {checkpoint.name}). A resumed run keeps its settings. Put them back with:"
            f" cp {place} {run_dir / 'config.json'}. To train with others, start a new run with"
            f" model.path={checkpoint}.",
            code="config-changed",
        )


@dataclass(frozen=True, slots=True)
class Chosen:
    """The checkpoint that a run goes on from."""

    checkpoint: Path | None = None
    """None where there is none."""
    state: TrainState = field(default_factory=TrainState.fresh)
    passed: Sequence[Path] = ()
    """Newer ones that cannot be gone on from."""
    notices: Sequence[str] = ()
    """What is lost by that, one sentence each."""


def choose_checkpoint(run_dir: Path, checkpoints_dir: Path, *, accepts: bool) -> Chosen:
    """Returns the newest checkpoint of a run, or with `accepts` the newest that can be gone on
    from: its files and the metrics that it has seen are whole.

    Raises:
        CheckpointError: the newest cannot be gone on from, and is not to be passed over, or none
            can.
    """
    if not (found := in_order(checkpoints_dir)):
        return Chosen()
    *older, newest = found
    try:
        state = read_state(newest)
        _refuse_short(run_dir, state, newest)
        return Chosen(newest, state)
    except DamagedCheckpoint as error:
        instead = _whole_among(run_dir, older) if accepts else None
        if instead is None:
            raise
        checkpoint, earlier = instead
        passed = [*older[older.index(checkpoint) + 1 :], newest]
        notice = (
            f"{error.reason}; the run goes on from {checkpoint.name}, and updates after"
            f" {earlier.update} are lost and learned again"
        )
        return Chosen(checkpoint, earlier, passed, [notice])


def _whole_among(run_dir: Path, checkpoints: Sequence[Path]) -> tuple[Path, TrainState] | None:
    """The newest checkpoint that is whole and whose metrics are, with its state."""
    for one in reversed(checkpoints):
        state = whole_state(one)
        if state is None or _metrics_size(run_dir) < state.metrics_size:
            continue
        noted, here = state.beside.get(METRICS), ResumeInputs(run_dir).checksums(state)
        if noted is None or noted == here.get(METRICS):
            return one, state
    return None


def _metrics_size(run_dir: Path) -> int:
    path = run_dir / METRICS
    return path.stat().st_size if path.is_file() else 0


def _refuse_short(run_dir: Path, state: TrainState, checkpoint: Path) -> None:
    """Raises DamagedCheckpoint where metrics that a checkpoint has seen are gone: there is nothing
    to cut to."""
    size = _metrics_size(run_dir)
    if size >= state.metrics_size:
        return
    checkpoints = in_order(checkpoint.parent)
    instead = _whole_among(run_dir, checkpoints[: checkpoints.index(checkpoint)])
    way = ways_out(run_dir, checkpoint, f"from {instead[0].name}" if instead else None)
    raise DamagedCheckpoint(
        f"run folder '{run_dir}': metrics.jsonl has {size} bytes, {checkpoint.name} saw"
        f" {state.metrics_size}; the file was damaged, or changed or removed by hand",
        f" {way}",
        code="metrics-changed",
    )


def refuse_changes(
    run_dir: Path, state: TrainState, checkpoint: Path, *, accepts: bool
) -> Sequence[str]:
    """Compares what lies beside a checkpoint with the checksums in it, the buffer left out.

    Args:
        accepts: changes are returned, one sentence each, instead of refused.

    Raises:
        CheckpointError: something has changed or is missing.
    """
    replayed = [name for name in state.beside if name.startswith(_REPLAYED)]
    changed = _changes(state.beside, ResumeInputs(run_dir).checksums(state, replayed))
    if changed and not accepts:
        raise CheckpointError(
            f"run folder '{run_dir}': {'; '.join(changed)} since {checkpoint.name} was written, so"
            f" the resumed run would not equal an undisturbed one. {ways_out(run_dir, checkpoint)}",
            code="inputs-changed",
        )
    return changed


def _changes(noted: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    changed = []
    for name, checksum in noted.items():
        # The buffer is compared where it is opened.
        if name not in here and (name == METRICS or name.startswith(("trees/", "reference/"))):
            changed.append(f"{name} is missing")
        elif name in here and here[name] != checksum:
            changed.append(f"{name} has changed")
    return changed


def ways_out(run_dir: Path, checkpoint: Path, how: str | None = "all the same") -> str:
    """Returns how to go on where something beside a checkpoint has changed: `how` with the option
    that accepts it, None for not at all."""
    ways = ["Put it back"]
    if how is not None:
        ways.append(f"go on {how} with: treegraft train --resume {run_dir} {ACCEPT}")
    ways.append(f"or start a new run with model.path={checkpoint}")
    return f"{', '.join(ways)}."
