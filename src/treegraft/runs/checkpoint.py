"""Checkpoints without their tensors: state, names, checksums, and which folders stay."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from treegraft.core.errors import CheckpointError

FORMAT_VERSION = 1


PARTIAL, ASIDE = ".partial", ".aside"
"""Endings of folders that are half written or half removed, and of one that is being replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """The small part of a checkpoint."""

    update: int
    """Updates learned, and the version of the policy; 0 is the state before the first."""
    warmup_steps: int
    """Warm-up steps done."""
    is_closed: bool = False
    """That update is evaluated (where the recipe says so) and logged; False during warm-up."""
    pending: Mapping[str, float] = field(default_factory=dict)
    """Its metrics so far, while it is not closed."""
    metrics_size: int
    """Length of metrics.jsonl in bytes when the checkpoint was written."""
    best_accuracy: float | None = None
    """Best held-out accuracy so far; None before the first evaluation."""
    first_gap: float | None = None
    """learn/engine_gap of the first update that learned."""
    num_breaches: int = 0
    """Updates in a row whose gap was too large."""

    @classmethod
    def fresh(cls) -> TrainState:
        """Returns the state in which nothing is done."""
        return cls(update=0, warmup_steps=0, metrics_size=0)


def checksums_of(folder: Path) -> dict[str, str]:
    """Returns the checksum of each file in the folder, by its path there."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): file_checksum(file) for file in files}


def file_checksum(path: Path) -> str:
    """Returns a checksum of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def read_state(folder: Path) -> TrainState:
    """Returns the state of a checkpoint whose files are all as they were written.

    Raises:
        CheckpointError: not a checkpoint of ours, of another format version, or damaged.
    """
    path = folder / "treegraft" / "state.json"
    if not path.exists():
        raise CheckpointError(
            f"checkpoint '{folder}': there is no treegraft/state.json; expected a folder written by"
            " `treegraft train` (a plain model can be started from with model.path, not"
            f" resumed).{_way_out(folder)}"
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        version, checksums = data.pop("format_version"), data.pop("checksums")
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"checkpoint '{folder}': got format version {version}, expected {FORMAT_VERSION};"
                " another version of Treegraft wrote it. Resume it with that one, or start from"
                " its weights with model.path."
            )
        state = TrainState(**data)
        missing = [name for name in checksums if not (folder / name).is_file()]
        damaged = [
            name
            for name, sum in checksums.items()
            if name not in missing and file_checksum(folder / name) != sum
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise _unreadable(folder, error) from error
    for names, what in ((missing, "missing"), (damaged, "different from what was written")):
        if names:
            raise CheckpointError(
                f"checkpoint '{folder}' is damaged: {', '.join(names)}"
                f" {'is' if len(names) == 1 else 'are'} {what}.{_way_out(folder)}"
            )
    return state


def _unreadable(folder: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"checkpoint '{folder}': it could not be read ({type(error).__name__}: {error}); it is"
        f" damaged or of another program.{_way_out(folder)}"
    )


def _way_out(folder: Path) -> str:
    """What to do about a checkpoint that cannot be used, where it lies in a run folder."""
    if folder.parent.name != "checkpoints":
        return ""
    others = [other for other in _in_order(folder.parent) if other != folder]
    run = folder.parent.parent
    instead = f"from {others[-1].name}" if others else "from the start"
    return f" Remove that folder, and `treegraft train --resume {run}` goes on {instead}."


def checkpoint_name(state: TrainState) -> str:
    """Returns the folder name: "update-000010", or "warmup-000150" before the first evaluation."""
    is_early = state.update == 0 and not state.is_closed
    return f"warmup-{state.warmup_steps:06d}" if is_early else f"update-{state.update:06d}"


def _in_order(checkpoints_dir: Path) -> list[Path]:
    return [
        folder
        for pattern in ("warmup-*", "update-*")
        for folder in sorted(checkpoints_dir.glob(pattern))
    ]


def latest_checkpoint(checkpoints_dir: Path) -> Path | None:
    """Returns the newest checkpoint, or None where there is none."""
    found = _in_order(checkpoints_dir)
    return found[-1] if found else None


def prune_checkpoints(checkpoints_dir: Path, keep: int) -> None:
    """Removes all but the latest `keep` checkpoints and the best one ("best" is a folder of its
    own)."""
    updates, found = sorted(checkpoints_dir.glob("update-*")), _in_order(checkpoints_dir)
    for folder in found:
        if folder not in (updates or found)[-keep:]:
            gone = folder.with_name(f".{folder.name}{PARTIAL}")
            shutil.rmtree(gone, ignore_errors=True)
            shutil.rmtree(folder.replace(gone))


def tidy(checkpoints_dir: Path) -> None:
    """Puts back what a killed process had moved aside, and removes what it had half written or half
    removed."""
    for aside in checkpoints_dir.glob(f".*{ASIDE}"):
        proper = aside.with_name(aside.name[1 : -len(ASIDE)])
        if proper.exists():
            shutil.rmtree(aside)
        else:
            aside.replace(proper)
    for partial in checkpoints_dir.glob(f".*{PARTIAL}"):
        shutil.rmtree(partial)
