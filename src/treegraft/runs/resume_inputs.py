"""What lies beside a checkpoint and a resumed run depends on: metrics so far, the evaluation before
the first update, trees to be replayed, the reference of the KL term, the Step-Trace Buffer.

A checkpoint holds a checksum of each, by its path in the run folder, so that nothing of it changes
unseen between the end of one process and the start of the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from treegraft.core.errors import CheckpointError, SettingError
from treegraft.core.files import file_checksum
from treegraft.runs.checkpoint import TrainState
from treegraft.settings.config import Config, settings_with
from treegraft.settings.load import differences, load_config

METRICS = "metrics.jsonl"
_FILES = ("trees/eval-000000-*.jsonl", "reference/*.safetensors")
_REPLAYED = "trees/update-"
ACCEPT = "--accept-changes"
"""The option with which a resumed run takes as they are the things that have changed."""


class ResumeInputs:
    """The checksums of a run folder. A file is read once, unless it changes."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._known: dict[Path, tuple[tuple[int, int], str]] = {}

    def checksums(self, state: TrainState, replayed: Iterable[Path] = ()) -> dict[str, str]:
        """Returns the checksum of each thing but the buffer; of metrics.jsonl that of the beginning
        that the state has seen.

        Args:
            replayed: the files of `Replay.files`.
        """
        # Before, what is there was left by a process that was killed, and is written again.
        is_begun = state.is_closed or state.update > 0
        files = [one for pattern in _FILES for one in self._run_dir.glob(pattern) if is_begun]
        files += [one for one in replayed if one.is_file()]
        found = {one.relative_to(self._run_dir).as_posix(): self._checksum(one) for one in files}
        if state.metrics_size:
            found[METRICS] = file_checksum(self._run_dir / METRICS, state.metrics_size)
        return dict(sorted(found.items()))

    def _checksum(self, path: Path) -> str:
        facts = path.stat()
        stamp = (facts.st_size, facts.st_mtime_ns)
        if path not in self._known or self._known[path][0] != stamp:
            self._known[path] = (stamp, file_checksum(path))
        return self._known[path][1]


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
            code="checkpoint-unreadable",
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


def refuse_changes(
    run_dir: Path, state: TrainState, checkpoint: Path, *, accepts: bool
) -> Sequence[str]:
    """Compares what lies beside a checkpoint with the checksums in it, the buffer left out.

    Args:
        accepts: changes are returned, one sentence each, instead of refused.

    Raises:
        CheckpointError: something has changed or is missing.
    """
    size = (run_dir / METRICS).stat().st_size if (run_dir / METRICS).is_file() else 0
    if size < state.metrics_size:
        # Without them there is nothing to cut to, so this cannot be accepted.
        raise CheckpointError(
            f"run folder '{run_dir}': metrics.jsonl has {size} bytes, {checkpoint.name} saw"
            f" {state.metrics_size}; the file was changed or removed by hand."
            f" {ways_out(run_dir, checkpoint, can_accept=False)}",
            code="metrics-changed",
        )
    replayed = [run_dir / name for name in state.beside if name.startswith(_REPLAYED)]
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


def ways_out(run_dir: Path, checkpoint: Path, *, can_accept: bool = True) -> str:
    """Returns how to go on where something beside a checkpoint has changed."""
    ways = ["Put it back"]
    if can_accept:
        ways.append(f"go on all the same with: treegraft train --resume {run_dir} {ACCEPT}")
    ways.append(f"or start a new run with model.path={checkpoint}")
    return f"{', '.join(ways)}."
