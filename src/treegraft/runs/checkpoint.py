"""Checkpoints without their tensors: state, names, checksums, and which folders stay."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from treegraft.core.errors import CheckpointError
from treegraft.core.files import file_checksum, parse_json, remove_folder

FORMAT_VERSION = 2
"""Of state.json; 1 is that of 0.6."""
PARTIAL = ".partial"
ASIDE = ".aside"
"""Endings of folders that are half written or half removed, and of one that is being replaced."""
_LOADED = (".json", ".jinja", ".safetensors", ".bin", ".model")
"""Endings of files that libraries look for in a folder, whether something names them or not."""


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
    num_drawn: int = 0
    """Training tasks drawn so far."""
    own_drawn: tuple[str, ...] = ()
    """Ids of tasks that a loop of one's own chose itself, for lessons of earlier tasks."""
    spent: tuple[int, int] = (0, 0)
    """Tool calls executed in training so far, replayed ones included, and tokens sampled."""
    lesson_value: tuple[float, float] | None = None
    """Sum of the agent's mean rewards and weight of the tasks, decayed, see `policy.learn.lessons`;
    None before the first update with lessons."""
    sampler: Mapping[str, Any] | None = None
    """What the sampler of tasks has learned, see `interfaces.TaskSampler`; None for nothing."""
    beside: Mapping[str, str] = field(default_factory=dict)
    """Checksums of what lies beside the checkpoint and a resume depends on, by path in the run
    folder, see `runs.resume`."""

    def __post_init__(self) -> None:
        if min(self.update, self.warmup_steps, self.metrics_size, self.num_breaches) < 0:
            raise ValueError("a count below 0")

    @classmethod
    def fresh(cls) -> TrainState:
        """Returns the state in which nothing is done."""
        return cls(update=0, warmup_steps=0, metrics_size=0)


_STATE = TypeAdapter(TrainState)


def checksums_of(folder: Path) -> dict[str, str]:
    """Returns the checksum of each file in the folder, by its path there."""
    # All files: a swapped tokenizer or template would change a resumed run unseen.
    return {name: file_checksum(file) for name, file in _files(folder).items()}


def _files(folder: Path) -> dict[str, Path]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): file for file in files}


def state_json(state: TrainState, checksums: Mapping[str, str]) -> str:
    """Returns the text of state.json; `checksums` are those of the checkpoint's other files."""
    data = {"format_version": FORMAT_VERSION, **asdict(state), "checksums": checksums}
    return json.dumps(data | {"checksum": _own_checksum(data)}, indent=1)


def _own_checksum(data: Mapping[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_state(folder: Path) -> TrainState:
    """Returns the state of a checkpoint whose files are all as they were written.

    Raises:
        CheckpointError: not a checkpoint of ours, of another format version, or damaged.
    """
    path = folder / "treegraft" / "state.json"
    # A pipe would keep the reader waiting.
    if not path.is_file():
        raise CheckpointError(
            f"checkpoint '{folder}': there is no treegraft/state.json; expected a folder written by"
            " `treegraft train` (a plain model can be started from with model.path, not resumed)."
            f"{way_out(folder)}",
            code="checkpoint-without-state",
        )
    try:
        data = parse_json(path.read_bytes())
        own = data.pop("checksum", None)
        version = data["format_version"]
        if version != FORMAT_VERSION or isinstance(version, str | bool):
            raise CheckpointError(
                f"checkpoint '{folder}': got format version {version!r}, expected {FORMAT_VERSION};"
                " another version of Treegraft wrote it (1: 0.6 or older). Resume it with that one,"
                " or start from its weights with model.path.",
                code="checkpoint-version",
            )
        if own != _own_checksum(data):
            raise CheckpointError(
                f"checkpoint '{folder}' is damaged: treegraft/state.json is different from what was"
                f" written.{way_out(folder)}",
                code="checkpoint-changed",
            )
        del data["format_version"]
        checksums = data.pop("checksums")
        # Strict, so that a text in place of a number is damage and not converted.
        state = _STATE.validate_json(json.dumps(data), strict=True)
        faults: dict[str, list[str]] = {}
        for name, sum in checksums.items():
            if not (folder / name).is_file():
                faults.setdefault("missing", []).append(name)
            elif file_checksum(folder / name) != sum:
                faults.setdefault("different from what was written", []).append(name)
        for name in _files(folder):
            # Libraries load such a file if it is there, whoever has put it there.
            if name not in (*checksums, "treegraft/state.json") and name.endswith(_LOADED):
                what = "new since it was written, and would be loaded with it"
                faults.setdefault(what, []).append(name)
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise unreadable(folder, error) from error
    for what, names in faults.items():
        raise CheckpointError(
            f"checkpoint '{folder}' is damaged: {', '.join(names)}"
            f" {'is' if len(names) == 1 else 'are'} {what}.{way_out(folder)}",
            code="checkpoint-files-differ",
        )
    return state


def unreadable(folder: Path, error: Exception) -> CheckpointError:
    """Returns what to raise for a checkpoint that reading has failed with."""
    text = f"{type(error).__name__}: {error}"
    # Of many faults the first.
    reason = " ".join(text.split()) if len(text) < 300 else f"{' '.join(text[:300].split())} …"
    return CheckpointError(
        f"checkpoint '{folder}': it could not be read ({reason}); it is damaged or of another"
        f" program.{way_out(folder)}",
        code="checkpoint-unreadable",
    )


def way_out(folder: Path) -> str:
    """Returns what to do about a checkpoint that a run cannot go on from, with a space before it;
    "" for a checkpoint that is in no run folder."""
    if folder.parent.name != "checkpoints" or folder.name == "best":
        return ""
    before = [other.name for other in in_order(folder.parent) if other != folder]
    what = f"goes on from {before[-1]}" if before else "begins anew"
    resume = f"treegraft train --resume {folder.parent.parent}"
    return f" Remove that folder, and the run {what} with: {resume}"


def checkpoint_name(state: TrainState) -> str:
    """Returns the folder name: "update-000010", or "warmup-000150" before the first evaluation."""
    is_early = state.update == 0 and not state.is_closed
    return f"warmup-{state.warmup_steps:06d}" if is_early else f"update-{state.update:06d}"


def in_order(checkpoints_dir: Path) -> list[Path]:
    """Returns the checkpoints of a run but the best, the newest last."""
    return [*sorted(checkpoints_dir.glob("warmup-*")), *sorted(checkpoints_dir.glob("update-*"))]


def latest_checkpoint(checkpoints_dir: Path) -> Path | None:
    """Returns the newest checkpoint, or None where there is none."""
    found = in_order(checkpoints_dir)
    return found[-1] if found else None


def prune_checkpoints(checkpoints_dir: Path, keep: int) -> None:
    """Removes all but the latest `keep` checkpoints and the best one ("best" is a folder of its
    own)."""
    updates = sorted(checkpoints_dir.glob("update-*"))
    found = in_order(checkpoints_dir)
    for folder in found:
        if folder not in (updates or found)[-keep:]:
            gone = folder.with_name(f".{folder.name}{PARTIAL}")
            # Of an earlier process that was killed while it removed this one.
            if gone.exists():
                remove_folder(gone)
            remove_folder(folder.replace(gone))


def tidy(checkpoints_dir: Path) -> None:
    """Puts back what a killed process had moved aside, and removes what it had half written or half
    removed."""
    for aside in checkpoints_dir.glob(f".*{ASIDE}"):
        proper = aside.with_name(aside.name[1 : -len(ASIDE)])
        # One that was moved aside was whole; anything else there is a leftover.
        if proper.exists() or not (aside / "treegraft" / "state.json").is_file():
            remove_folder(aside)
        else:
            aside.replace(proper)
    for partial in checkpoints_dir.glob(f".*{PARTIAL}"):
        remove_folder(partial)
