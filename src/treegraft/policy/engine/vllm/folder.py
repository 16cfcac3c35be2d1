"""Weights on their way to servers: a folder of safetensors files, which each server reads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

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


def write_folder(path: Path, source: WeightSource) -> WeightsFolder:
    """Writes all weights of `source` into a new folder, and returns it.

    Tensors that share their memory (a head tied to the embeddings) are written once if they meet in
    one file.
    """
    path.mkdir(parents=True)
    files: list[str] = []
    twins: dict[str, list[str]] = {}
    # As yielded and as written: the first keeps its memory from being given to another tensor.
    held: dict[str, tuple[Tensor, Tensor]] = {}
    num_bytes = 0

    def close() -> None:
        if held:
            files.append(f"weights-{len(files):05d}.safetensors")
            save_file({name: own for name, (_, own) in held.items()}, path / files[-1])
            held.clear()

    for name, tensor in source:
        twin = _same_memory(tensor, held)
        if twin is not None:
            twins.setdefault(twin, []).append(name)
            continue
        own = tensor.detach().cpu().contiguous()
        held[name] = (tensor, own)
        num_bytes += own.nbytes
        if num_bytes >= FILE_BYTES:
            close()
            num_bytes = 0
    close()
    (path / _INDEX).write_text(json.dumps({"files": files, "twins": twins}), encoding="utf-8")
    return WeightsFolder(path)


def _same_memory(tensor: Tensor, held: dict[str, tuple[Tensor, Tensor]]) -> str | None:
    for name, (other, _) in held.items():
        if (other.data_ptr(), other.shape) == (tensor.data_ptr(), tensor.shape):
            return name
    return None
