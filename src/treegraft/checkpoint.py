"""Checkpoints: a folder that transformers loads, and in it treegraft/ with what training needs to go on.

    checkpoints/update-000010/
      config.json  model.safetensors  tokenizer files     the plain model, adapters merged or (adapter/) kept
      treegraft/config.json                               resolved settings
      treegraft/state.json                                counters, offsets, and a checksum of each tensor file
      treegraft/optimiser.safetensors                     float32 master weights and moments

The folder is written under another name and renamed when complete. Nothing in it is unpickled.
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

from treegraft.errors import CheckpointError
from treegraft.models import base_model

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """The small part of a checkpoint."""

    update: int
    """Updates done, and the version of the policy."""
    warmup_steps: int
    """Warm-up steps done."""
    has_begun: bool = False
    """The state before update 1 is evaluated and logged; False during and right after warm-up."""
    pending: Mapping[str, float] = field(default_factory=dict)
    """Metrics measured before that, not logged yet."""
    metrics_size: int
    """Length of metrics.jsonl in bytes when the checkpoint was written."""
    best_accuracy: float | None = None
    """Best held-out accuracy so far; None before the first evaluation."""
    first_gap: float | None = None
    """learn/engine_gap of the first update that learned."""
    num_breaches: int = 0
    """Updates in a row whose gap was too large."""


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
    """Writes a checkpoint to `folder`, all of it or nothing."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    inside = partial / "treegraft"
    inside.mkdir(parents=True)
    inner = base_model(model)
    own_weights = {name: tensor.detach().cpu().clone() for name, tensor in weights.items()}
    inner.save_pretrained(partial, state_dict=_untied(inner, own_weights))
    tokenizer.save_pretrained(partial)
    if keep_adapter and inner is not model:
        model.save_pretrained(partial / "adapter")
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in optimiser.items()}
    save_file(tensors, inside / "optimiser.safetensors")
    (inside / "config.json").write_text(config_json, encoding="utf-8")
    files = [inside / "optimiser.safetensors", *sorted(partial.glob("*.safetensors"))]
    data = {
        "format_version": FORMAT_VERSION,
        **asdict(state),
        "checksums": {str(file.relative_to(partial)): file_checksum(file) for file in files},
    }
    (inside / "state.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
    for file in partial.rglob("*"):
        if file.is_file():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
    if folder.exists():
        shutil.rmtree(folder)
    partial.replace(folder)


def _untied(model: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without the second name of tied weights, which safetensors would store twice."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return {name: tensor for name, tensor in weights.items() if name not in tied}


def file_checksum(path: Path) -> str:
    """Returns a checksum of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def load_checkpoint(folder: Path) -> tuple[TrainState, dict[str, torch.Tensor]]:
    """Returns (state, optimiser tensors); the weights are loaded by `models.load_model` from the folder itself.

    Raises:
        CheckpointError: not a checkpoint of ours, of another format version, or damaged.
    """
    path = folder / "treegraft" / "state.json"
    if not path.exists():
        raise CheckpointError(
            f"checkpoint '{folder}': there is no treegraft/state.json; expected a folder written by `treegraft train` "
            "(a plain model can be started from with model.path, not resumed)"
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        version, checksums = data.pop("format_version"), data.pop("checksums")
        if version != FORMAT_VERSION:
            raise CheckpointError(f"checkpoint '{folder}': format version {version}; this Treegraft reads {FORMAT_VERSION}")
        state = TrainState(**data)
        damaged = [name for name, checksum in checksums.items() if file_checksum(folder / name) != checksum]
        if damaged:
            raise CheckpointError(
                f"checkpoint '{folder}': {', '.join(damaged)} differ from what was written; "
                "the folder is damaged. Resume from an earlier one by removing it."
            )
        return state, load_file(folder / "treegraft" / "optimiser.safetensors")
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"checkpoint '{folder}': it could not be read ({error}); it is damaged or of another program"
        ) from error


def checkpoint_name(state: TrainState) -> str:
    """Returns the folder name: "update-000010", or "warmup-000150" before the first evaluation."""
    return f"update-{state.update:06d}" if state.has_begun else f"warmup-{state.warmup_steps:06d}"


def latest_checkpoint(checkpoints_dir: Path) -> Path | None:
    """Returns the newest complete checkpoint, or None where there is none."""
    for pattern in ("update-*", "warmup-*"):
        found = sorted(folder for folder in checkpoints_dir.glob(pattern) if (folder / "treegraft" / "state.json").exists())
        if found:
            return found[-1]
    return None


def prune_checkpoints(checkpoints_dir: Path, keep: int) -> None:
    """Removes all but the latest `keep` checkpoints and the best one ("best" is a folder of its own)."""
    for folder in sorted(checkpoints_dir.glob("update-*"))[:-keep]:
        shutil.rmtree(folder)
    if any(checkpoints_dir.glob("update-*")):
        for folder in checkpoints_dir.glob("warmup-*"):
            shutil.rmtree(folder)
    else:
        for folder in sorted(checkpoints_dir.glob("warmup-*"))[:-keep]:
            shutil.rmtree(folder)
