"""Checkpoints: a folder that transformers loads, and in it treegraft/ with the state that training
needs to go on.

    checkpoints/update-000010/
      config.json  model.safetensors the plain model, adapters merged into it; tokenizer files
      treegraft/config.json          resolved settings
      treegraft/state.json           counters, offsets, and a checksum of every other file
      treegraft/optimiser.safetensors  float32 master weights and moments; of several ranks each
                                     writes its rows (optimiser-00001-of-00002.safetensors, ...)

The folder is written under another name and renamed when complete; one that it replaces is moved
aside first. So whenever the process is killed, every folder with its proper name is whole, and
`tidy` puts back the one that was aside. Nothing is unpickled.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from treegraft.core.files import remove_folder
from treegraft.core.interfaces import LearnerLike
from treegraft.policy.output_head import base_model
from treegraft.policy.shards import TensorFiles
from treegraft.runs.checkpoint import (
    ASIDE,
    PARTIAL,
    TrainState,
    checksums_of,
    state_json,
)
from treegraft.runs.trust import remember, settings_of


def partial_of(folder: Path) -> Path:
    """Returns where a checkpoint is written before it gets its name."""
    return folder.with_name(f".{folder.name}{PARTIAL}")


def save_checkpoint(
    folder: Path,
    *,
    learner: LearnerLike,
    tokenizer: Any,
    state: TrainState,
    config_json: str,
    write_more: Callable[[Path], None] | None = None,
) -> None:
    """Writes a checkpoint to `folder`, all of it or nothing.

    Args:
        write_more: writes further files into the folder that it is given.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    partial = partial_of(folder)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        (partial / "treegraft").mkdir(parents=True)
        learner.save(partial)
        if write_more is not None:
            write_more(partial)
        for trace in ("is_local", "local_files_only"):
            # Where a tokenizer was loaded from is no part of it; a resumed run's would differ from
            # an undisturbed one's.
            getattr(tokenizer, "init_kwargs", {}).pop(trace, None)
        tokenizer.save_pretrained(partial)
        settings_of(partial).write_text(config_json, encoding="utf-8")
        # Last, since it holds the checksums of all others.
        text = state_json(state, checksums_of(partial))
        (partial / "treegraft" / "state.json").write_text(text, encoding="utf-8")
        remember(settings_of(partial))
        # On disk before the rename: after a loss of power, a name without its content would be
        # worse than the old checkpoint.
        for file in partial.rglob("*"):
            if file.is_file():
                with file.open("rb") as handle:
                    os.fsync(handle.fileno())
    except BaseException:
        # On a full disk its room is needed.
        shutil.rmtree(partial, ignore_errors=True)
        raise
    aside = folder.with_name(f".{folder.name}{ASIDE}")
    if aside.exists():
        remove_folder(aside)
    # A folder cannot be renamed onto one that is not empty.
    if folder.exists():
        folder.replace(aside)
    partial.replace(folder)
    if aside.exists():
        remove_folder(aside)


def write_model(folder: Path, model: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Writes the plain model as a folder that transformers loads.

    Args:
        weights: of the plain model by name, adapters merged into them.
    """
    inner = base_model(model)
    # Without the second name of tied weights, which safetensors would store twice.
    tied = getattr(inner, "all_tied_weights_keys", None) or {}
    # Cloned, since safetensors refuses tensors that share memory.
    own = {name: x.detach().cpu().clone() for name, x in weights if name not in tied}
    inner.save_pretrained(folder, state_dict=own)


def optimiser_file(folder: Path, suffix: str) -> Path:
    """Returns where the optimiser's state, or the rows of one rank, lies in a checkpoint."""
    return folder / "treegraft" / f"optimiser{suffix}.safetensors"


def optimiser_files(folder: Path) -> TensorFiles:
    """Returns the optimiser's state in a checkpoint; the weights are loaded by `load.load_model`
    from the folder itself. Raises `CheckpointError` for a file that cannot be read."""
    return TensorFiles(sorted((folder / "treegraft").glob("optimiser*.safetensors")))
