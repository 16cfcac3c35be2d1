"""Checkpoints: a folder that transformers loads, and in it treegraft/ with what training needs to
go on.

    checkpoints/update-000010/
      config.json  model.safetensors the plain model, adapters merged into it; tokenizer files
      adapter/                       with model.lora.merge = false: adapters, model without them
      treegraft/config.json          resolved settings
      treegraft/state.json           counters, offsets, and a checksum of every other file
      treegraft/optimiser.safetensors  float32 master weights and moments

The folder is written under another name and renamed when complete; one that it replaces is moved
aside first. So whenever the process is killed, every folder with its proper name is whole, and
`tidy` puts back the one that was aside. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from treegraft.core.errors import CheckpointError
from treegraft.policy.load import base_model

FORMAT_VERSION = 1
ADAPTER = "adapter"
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


def save_checkpoint(
    folder: Path,
    *,
    model: Any,
    tokenizer: Any,
    weights: Mapping[str, torch.Tensor],
    optimiser: Mapping[str, torch.Tensor],
    state: TrainState,
    config_json: str,
    keep_adapter: bool,
) -> None:
    """Writes a checkpoint to `folder`, all of it or nothing.

    Args:
        weights: the plain model's, adapters merged into them.
        keep_adapter: write the adapters apart, and the model without them.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    partial = folder.with_name(f".{folder.name}{PARTIAL}")
    shutil.rmtree(partial, ignore_errors=True)
    inside = partial / "treegraft"
    inside.mkdir(parents=True)
    inner = base_model(model)
    is_apart = keep_adapter and inner is not model
    plain = _without_adapters(inner) if is_apart else weights
    own_weights = {name: tensor.detach().cpu().clone() for name, tensor in plain.items()}
    inner.save_pretrained(partial, state_dict=_untied(inner, own_weights))
    for trace in ("is_local", "local_files_only"):
        # Where a tokenizer was loaded from is no part of it; a resumed run's would differ from an
        # undisturbed one's.
        getattr(tokenizer, "init_kwargs", {}).pop(trace, None)
    tokenizer.save_pretrained(partial)
    if is_apart:
        model.save_pretrained(partial / ADAPTER)
    tensors = {
        name: tensor.detach().cpu().contiguous().clone() for name, tensor in optimiser.items()
    }
    save_file(tensors, inside / "optimiser.safetensors")
    (inside / "config.json").write_text(config_json, encoding="utf-8")
    data = {"format_version": FORMAT_VERSION, **asdict(state), "checksums": _checksums(partial)}
    (inside / "state.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
    for file in partial.rglob("*"):
        if file.is_file():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
    aside = folder.with_name(f".{folder.name}{ASIDE}")
    shutil.rmtree(aside, ignore_errors=True)
    if folder.exists():
        folder.replace(aside)
    partial.replace(folder)
    shutil.rmtree(aside, ignore_errors=True)


def _checksums(folder: Path) -> dict[str, str]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): file_checksum(file) for file in files}


def _untied(model: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without the second name of tied weights, which safetensors would store twice."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return {name: tensor for name, tensor in weights.items() if name not in tied}


def _without_adapters(inner: Any) -> dict[str, torch.Tensor]:
    """The weights below the adapters, by the plain model's names."""
    weights = inner.state_dict().items()
    return {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in weights
        if ".lora_" not in name
    }


def with_saved_adapter(model: Any, folder: Path) -> Any:
    """Returns the model with the adapters merged that a checkpoint keeps beside it; the model
    itself where it keeps none."""
    if not (folder / ADAPTER).is_dir():
        return model
    from peft import PeftModel

    return PeftModel.from_pretrained(model, str(folder / ADAPTER)).merge_and_unload()


def file_checksum(path: Path) -> str:
    """Returns a checksum of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def load_checkpoint(folder: Path) -> tuple[TrainState, dict[str, torch.Tensor]]:
    """Returns (state, optimiser tensors); the weights are loaded by `models.load_model` from the
    folder itself.

    Raises:
        CheckpointError: not a checkpoint of ours, of another format version, or damaged.
    """
    state = read_state(folder)
    try:
        return state, load_file(folder / "treegraft" / "optimiser.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise _unreadable(folder, error) from error


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
