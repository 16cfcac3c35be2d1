"""Weights on their way to servers: a folder of safetensors files, which each server reads."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from treegraft.core.errors import EngineError

if TYPE_CHECKING:
    from treegraft.core.interfaces import WeightSource

FILE_BYTES = 1 << 30
"""Size from which a file is closed and the next one begun, so that no second copy of a large model
is ever held in memory."""
_INDEX = "weights.json"


class WeightsFolder:
    """Gives (name, tensor) of all weights, one after another, as a `WeightSource` does."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        index = json.loads((self.path / _INDEX).read_text(encoding="utf-8"))
        for file in index["files"]:
            with safe_open(self.path / file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    tensor = opened.get_tensor(name)
                    yield name, tensor
                    for twin in index["twins"].get(name, ()):
                        yield twin, tensor

    def num_bytes(self) -> int:
        """Returns the size of all files."""
        return sum(file.stat().st_size for file in self.path.iterdir())

    def remove(self) -> None:
        """Deletes the folder."""
        shutil.rmtree(self.path, ignore_errors=True)


@contextmanager
def held_folder(path: Path) -> Iterator[None]:
    """Holds a lock on a folder for the time of the block, which ends with the process at the
    latest. Raises OSError where another process holds it."""
    held = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(held)


def write_adapter(path: Path, source: WeightSource) -> WeightsFolder:
    """Writes LoRA's adapters alone into a new folder, as peft does, and returns it.

    Raises:
        EngineError: weights without adapters, or of several ranks.
    """
    adapted = getattr(source, "adapted", None)
    if adapted is None:
        raise EngineError(
            'publish.kind: got "adapter", but these weights come without adapters of this process;'
            ' expected model.lora.rank above 0 and one rank. Use "auto", which merges them.',
            code="adapter-missing",
        )
    # Embeddings are not trained, and peft would ask a hub whether they have changed.
    adapted.save_pretrained(path, save_embedding_layers=False)
    return WeightsFolder(path)


def write_folder(path: Path, source: WeightSource) -> WeightsFolder:
    """Writes all weights of `source` into a new folder, and returns it.

    Tensors that share their memory (a head tied to the embeddings) are written once where they meet
    in one file.
    """
    path.mkdir(parents=True)
    files: list[str] = []
    twins: dict[str, list[str]] = {}
    held: dict[str, tuple[Tensor, Tensor]] = {}
    """As given and as written: the first keeps its memory from being given to another tensor."""

    def close() -> None:
        if held:
            files.append(f"weights-{len(files):05d}.safetensors")
            save_file({name: own for name, (_, own) in held.items()}, path / files[-1])
            held.clear()

    for name, tensor in source:
        place = (tensor.data_ptr(), tensor.shape)
        same = (one for one, (given, _) in held.items() if (given.data_ptr(), given.shape) == place)
        twin = next(same, None)
        if twin:
            twins.setdefault(twin, []).append(name)
            continue
        own = tensor.detach().cpu().contiguous()
        held[name] = (tensor, own)
        if sum(own.nbytes for _, own in held.values()) >= FILE_BYTES:
            close()
    close()
    (path / _INDEX).write_text(json.dumps({"files": files, "twins": twins}), encoding="utf-8")
    return WeightsFolder(path)
