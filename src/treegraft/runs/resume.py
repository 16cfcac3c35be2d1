"""Going on with a run: its newest checkpoint, and whether all that it depends on is as it was.

Beside a checkpoint a resumed run depends on metrics so far, trees to be replayed, the reference of
the KL term, the Step-Trace Buffer, the demonstrations, the tasks and the Python objects that the
settings lead to. A checkpoint holds a checksum of each, so that nothing of it changes unseen
between the end of one process and the start of the next.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from treegraft.core.errors import CheckpointError, SettingError
from treegraft.core.files import file_checksum, storage_fault
from treegraft.runs.checkpoint import (
    TrainState,
    latest_checkpoint,
    read_state,
    tidy,
    way_out,
)
from treegraft.runs.open import own_config
from treegraft.runs.record import RunFolder
from treegraft.runs.tree_files import parts_in
from treegraft.runs.trust import require_trust, settings_of
from treegraft.settings.config import Config, settings_with
from treegraft.settings.load import differences, load_config
from treegraft.settings.objects import Source
from treegraft.settings.table import with_choices, with_value

METRICS = "metrics.jsonl"
_OF_FOLDER = (METRICS, "trees/", "reference/")
"""How the names of a checkpoint's inputs begin that are files of the run folder."""
_REFERENCE = "reference/*.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """A run to go on with, before anything is written."""

    config: Config
    folder: RunFolder | None = None
    """Claimed for this process; None for a new run."""
    checkpoint: Path | None = None
    """The checkpoint to go on from; None starts at the beginning."""
    state: TrainState
    notices: Sequence[str] = ()
    """What the user is told when the run begins, one sentence each."""


def resumed(run_dir: Path, config: Source | None, *, accepts_changes: bool) -> Resumed:
    """Returns where a run goes on: at its latest checkpoint, or at its beginning if it has none.

    Args:
        config: the settings it was started with; only those declared as resumable may differ. None
            takes its own.
        accepts_changes: go on although metrics, evaluations or the buffer have changed since the
            checkpoint was written.

    Raises:
        CheckpointError: no run folder, a damaged checkpoint, other settings, or something else that
            has changed.
    """
    own = own_config(run_dir)
    settings = _resumed_settings(run_dir, own, config)
    folder = RunFolder.open(run_dir)
    # Before anything is read or tidied: another process may be writing a checkpoint.
    folder.claim()
    try:
        tidy(folder.checkpoints_dir)
        checkpoint = latest_checkpoint(folder.checkpoints_dir)
        state = TrainState.fresh()
        notices = []
        if checkpoint is None and folder.metrics_size():
            notices.append(
                f"{run_dir} has no checkpoint; the run begins anew, and its metrics and trees so"
                " far are removed"
            )
        if checkpoint is not None:
            state = read_state(checkpoint)
            _refuse_short(folder, state, checkpoint)
            # It has settings of its own, which are read next.
            require_trust(settings_of(checkpoint))
            refuse_other_settings(run_dir, own, checkpoint)
            places = {name: name for name in state.beside if name.startswith(_OF_FOLDER)}
            changed = changes(state.beside, folder_inputs(run_dir, state, places), places)
            if not accepts_changes:
                refuse_changed(run_dir, checkpoint, changed)
            notices += changed
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


def folder_inputs(run_dir: Path, state: TrainState, replayed: Iterable[str] = ()) -> dict[str, str]:
    """Returns the checksums of what a run folder holds and a resume depends on; of metrics.jsonl
    that of the beginning that the state has seen.

    Args:
        replayed: `Replay.labels`.
    """
    found = {}
    # Before, what is there was left by a process that was killed, and is written again.
    is_begun = state.is_closed or state.update > 0
    for path in run_dir.glob(_REFERENCE) if is_begun else ():
        facts = path.stat()
        name = path.relative_to(run_dir).as_posix()
        found[name] = _checksum(path, facts.st_size, facts.st_mtime_ns)
    for part in parts_in(run_dir / "trees"):
        if part.label in replayed:
            found[part.label] = part.checksum()
    if state.metrics_size:
        # Of the beginning alone: what follows belongs to updates that are repeated.
        found[METRICS] = file_checksum(run_dir / METRICS, state.metrics_size)
    return dict(sorted(found.items()))


@functools.lru_cache(maxsize=8)
def _checksum(path: Path, size: int, mtime_ns: int) -> str:
    """The checksum of a large file, which is read once."""
    return file_checksum(path)


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


def changes(
    noted: Mapping[str, str], here: Mapping[str, str], places: Mapping[str, str]
) -> list[str]:
    """Returns a sentence for each input that is missing or not as a checkpoint noted it.

    Args:
        noted, here: checksums then and now, by name.
        places: what to call the inputs to compare.
    """
    found = []
    for name, place in places.items():
        if name in noted and name not in here:
            found.append(f"{place} is missing")
        elif name in noted and noted[name] != here[name]:
            found.append(f"{place} has changed")
    return found


def refuse_changed(run_dir: Path, checkpoint: Path, changed: Sequence[str]) -> None:
    """Raises CheckpointError if there are any changes."""
    if changed:
        raise CheckpointError(
            f"run folder '{run_dir}': {'; '.join(changed)} since {checkpoint.name} was written, so"
            " the resumed run would not equal an undisturbed one. Put it back, go on all the same"
            f" with: treegraft train --resume {run_dir} --accept-changes, or start a new run with"
            f" model.path={checkpoint}.",
            code="inputs-changed",
        )
