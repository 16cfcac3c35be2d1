"""Going on with a run: its newest checkpoint, and whether all that it depends on is as it was.

Beside a checkpoint a resumed run depends on metrics so far, the evaluation before the first update,
trees to be replayed, the reference of the KL term, the Step-Trace Buffer, the demonstrations and
the tasks. A checkpoint holds a checksum of each, so that nothing of it changes unseen between the
end of one process and the start of the next.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treegraft.core.errors import CheckpointError, SettingError
from treegraft.core.files import file_checksum, storage_fault
from treegraft.core.given import GIVEN, GivenObjects, Record
from treegraft.runs.checkpoint import (
    TrainState,
    latest_checkpoint,
    read_state,
    tidy,
    way_out,
    whole_state,
)
from treegraft.runs.open import own_config
from treegraft.runs.record import RunFolder
from treegraft.runs.tree_files import TreePart, parts_in
from treegraft.runs.trust import require_trust, settings_of
from treegraft.settings.config import Config, settings_with
from treegraft.settings.load import differences, load_config
from treegraft.settings.objects import Source
from treegraft.settings.table import with_choices, with_value

METRICS = "metrics.jsonl"
ACCEPT = "--accept-changes"
"""The option with which a resumed run takes as they are the things that have changed."""
_REFERENCE = "reference/*.safetensors"
_REPLAYED = "trees/update-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """A run to go on with, before anything is written."""

    config: Config
    folder: RunFolder
    """Claimed for this process."""
    checkpoint: Path | None
    """The checkpoint to go on from; None starts at the beginning."""
    state: TrainState
    notices: Sequence[str]
    """What the user is told when the run begins, one sentence each."""


def resumed(
    run_dir: Path, config: Source | None, given: GivenObjects, *, accepts_changes: bool
) -> Resumed:
    """Returns where a run goes on: at its latest checkpoint, or at its beginning if it has none.

    Args:
        config: the settings it was started with; only those declared as resumable may differ. None
            takes its own.
        given: the Python objects that the settings lead to.
        accepts_changes: go on although metrics, evaluations or the buffer have changed since the
            checkpoint was written.

    Raises:
        SettingError: the run was begun with Python objects, and one of them is missing.
        CheckpointError: no run folder, a damaged checkpoint, other settings, or something else that
            has changed.
    """
    own = own_config(run_dir)
    settings = _resumed_settings(run_dir, own, config)
    folder = RunFolder.open(run_dir)
    changed = _changed_objects(folder.read_objects(), given, str(run_dir))
    # Before anything is read or tidied: another process may be writing a checkpoint.
    folder.claim()
    try:
        tidy(folder.checkpoints_dir)
        checkpoint = latest_checkpoint(folder.checkpoints_dir)
        state = TrainState.fresh()
        notices = [*changed, *_of_the_beginning(folder, checkpoint)]
        if checkpoint is not None:
            state = read_state(checkpoint)
            _refuse_short(folder, state, checkpoint)
            require_trust(settings_of(checkpoint))
            refuse_other_settings(run_dir, own, checkpoint)
            notices += refuse_changes(run_dir, state, checkpoint, accepts=accepts_changes)
            notices += _damaged_results(folder, state.update, settings)
        if settings.run.num_updates < state.update:
            raise CheckpointError(
                f"run folder '{run_dir}' has done {state.update} updates; run.num_updates is"
                f" {settings.run.num_updates}, expected at least {state.update}.",
                code="updates-done",
            )
    except BaseException as error:
        folder.release()
        if isinstance(error, OSError):
            raise CheckpointError(
                f"run folder '{run_dir}' cannot be worked in ({storage_fault(error) or error}).",
                code="run-unwritable",
            ) from error
        raise
    return Resumed(
        config=settings,
        folder=folder,
        checkpoint=checkpoint,
        state=state,
        notices=notices,
    )


def _resumed_settings(run_dir: Path, own: Config, config: Source | None) -> Config:
    """The settings of a resumed run, which differ from its own in what a resume may change."""
    settings = own if config is None else load_config(config)
    # The folder is named already; a recipe need not repeat what was typed for the first start.
    if settings.run.name is None:
        settings = with_value(settings, "run.name", own.run.name)
    # Chosen when the run began; on another machine the choice could be another.
    settings = with_choices(settings, own)
    may_change = settings_with("resumable")
    refused = [one for one in differences(own, settings) if not one.startswith(may_change)]
    if refused:
        named = ", ".join(f"[{one[:-1]}]" if one.endswith(".") else one for one in may_change)
        raise CheckpointError(
            f"run folder '{run_dir}' was started with other settings: {'; '.join(refused)}. A"
            f" resumed run may change {named} only; leave the rest as it was, or start a new run.",
            code="resumed-other-settings",
        )
    return settings


def _changed_objects(noted: Sequence[Record], now: GivenObjects, run_dir: str) -> list[str]:
    """Returns a sentence for each object whose source has changed since it was noted.

    Raises:
        SettingError: an object that the settings lead to was not given again.
    """
    present = {record.name: record for record in now.records}
    missing = [one for one in noted if one.name.startswith(GIVEN) and one.name not in present]
    if missing:
        asked = ", ".join(f"{one.argument}= ({one.qualified})" for one in missing)
        raise SettingError(
            f"run folder '{run_dir}' was begun with Python objects, which it cannot keep; expected"
            f" the same ones again: {asked}. Call treegraft.train(resume=..., ...) with them.",
            code="objects-not-given",
        )
    return [
        f"'{one.qualified}' ({one.argument}=) has changed since the run began, so what follows may"
        " differ from an uninterrupted run"
        for one in noted
        if one.name in present and present[one.name].checksum != one.checksum
    ]


def _of_the_beginning(folder: RunFolder, checkpoint: Path | None) -> Iterator[str]:
    """What is lost where a run without a checkpoint begins anew."""
    if os.path.lexists(folder.checkpoints_dir) and not folder.checkpoints_dir.is_dir():
        raise CheckpointError(
            f"run folder '{folder.path}': checkpoints is not a folder; expected the one that"
            " `treegraft train` made. Put it back.",
            code="checkpoints-no-folder",
        )
    if checkpoint is None and folder.metrics_size():
        yield (
            f"{folder.path} has no checkpoint; the run begins anew, and its metrics and trees so"
            " far are removed"
        )


def _damaged_results(folder: RunFolder, update: int, config: Config) -> Iterator[str]:
    """What a resume does not depend on, and is not as it was written."""
    has_all = config.track.record_trees and config.track.keep_trees is None
    if damaged := folder.damaged_trees(update, has_all=has_all):
        more = f" and {len(damaged) - 3} more" if len(damaged) > 3 else ""
        yield (
            f"{', '.join(damaged[:3])}{more}: missing or not as written, so that what is shown of"
            " them may be wrong; the run itself does not depend on them and goes on as it was"
        )
    best = folder.checkpoints_dir / "best"
    if best.exists() and whole_state(best) is None:
        yield (
            f"{best} is damaged; the run goes on without it, and the next better evaluation"
            " replaces it"
        )


class FolderInputs:
    """The checksums of what a run folder holds and a resume depends on. What has not changed is
    read once."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._known: dict[Any, str] = {}

    def checksums(self, state: TrainState, replayed: Iterable[str] = ()) -> dict[str, str]:
        """Returns the checksum of each; of metrics.jsonl that of the beginning that the state has
        seen.

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
    place = settings_of(checkpoint)
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


def _refuse_short(folder: RunFolder, state: TrainState, checkpoint: Path) -> None:
    """Raises CheckpointError if metrics that a checkpoint has seen are gone: there is nothing to
    cut to."""
    size = folder.metrics_size()
    if size < state.metrics_size:
        raise CheckpointError(
            f"run folder '{folder.path}': metrics.jsonl has {size} bytes, {checkpoint.name} saw"
            f" {state.metrics_size}; the file was damaged, or changed or removed by hand. Put it"
            f" back; without it '{checkpoint}' is of no use.{way_out(checkpoint)}",
            code="metrics-changed",
        )


def refuse_changes(
    run_dir: Path, state: TrainState, checkpoint: Path, *, accepts: bool
) -> Sequence[str]:
    """Compares what the run folder holds with the checksums in a checkpoint.

    Args:
        accepts: changes are returned, one sentence each, instead of refused.

    Raises:
        CheckpointError: something has changed or is missing.
    """
    replayed = [name for name in state.beside if name.startswith(_REPLAYED)]
    changed = _changes(state.beside, FolderInputs(run_dir).checksums(state, replayed))
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
        # What a session reads is compared by `refuse_changed_inputs`.
        if name not in here and (name == METRICS or name.startswith(("trees/", "reference/"))):
            changed.append(f"{name} is missing")
        elif name in here and here[name] != checksum:
            changed.append(f"{name} has changed")
    return changed


def ways_out(run_dir: Path, checkpoint: Path) -> str:
    """Returns how to go on if something beside a checkpoint has changed."""
    return (
        f"Put it back, go on all the same with: treegraft train --resume {run_dir} {ACCEPT}, or"
        f" start a new run with model.path={checkpoint}."
    )


CHANGED = {
    "tasks": "the tasks have changed",
    "demonstrations": "the demonstrations{} have changed",
    "buffer": "the Step-Trace Buffer '{}' (traces, vectors or evictions) has changed",
}
"""What a session reads, by its name among the inputs, and the sentence when it is another; with the
place if there is one."""


def refuse_changed_inputs(
    run_dir: Path,
    state: TrainState,
    checkpoint: Path,
    inputs: Mapping[str, str],
    places: Mapping[str, object],
) -> None:
    """Compares what a session reads (tasks, demonstrations, buffer) with the checksums in the
    checkpoint that it goes on from.

    Args:
        inputs: the checksums now, by name; those that the checkpoint has none of do not matter.
        places: where they are read from.

    Raises:
        CheckpointError: one has changed, or the run's own buffer is missing.
    """
    for name, what in CHANGED.items():
        noted, here = state.beside.get(name), inputs.get(name)
        if noted is None or noted == here or (here is None and name != "buffer"):
            continue
        if here is None:
            raise CheckpointError(
                f"run folder '{run_dir}': its Step-Trace Buffer {places[name]} is missing, which"
                f" {checkpoint.name} was trained with. {ways_out(run_dir, checkpoint)}",
                code="run-buffer-missing",
            )
        text = (
            f"run folder '{run_dir}': {what.format(places.get(name, ''))} since"
            f" {checkpoint.name} was written, so the resumed run would not equal an undisturbed"
            f" one. {ways_out(run_dir, checkpoint)}"
        )
        # Written out, so that each code is found where it is raised.
        if name == "tasks":
            raise CheckpointError(text, code="tasks-changed")
        if name == "demonstrations":
            raise CheckpointError(text, code="demonstrations-changed")
        raise CheckpointError(text, code="buffer-changed")
