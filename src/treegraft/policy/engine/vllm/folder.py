"""Weights on their way to servers: a folder with a safetensors file for each tensor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

if TYPE_CHECKING:
    from treegraft.core.interfaces import WeightSource


def write_folder(path: Path, source: WeightSource) -> int:
    """Writes all weights of `source` into a new folder; returns their bytes."""
    path.mkdir(parents=True)
    num_bytes = 0
    # A file each: no second copy of a large model is in memory, and tensors that share theirs (a
    # head tied to the embeddings), which a file may not hold together, need no special case.
    for number, (name, tensor) in enumerate(source):
        own = tensor.detach().cpu().contiguous()
        save_file({name: own}, path / f"{number:05d}.safetensors")
        num_bytes += own.nbytes
    return num_bytes


def read_folder(path: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) of all weights, one after another."""
    for file in sorted(Path(path).iterdir()):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                yield name, opened.get_tensor(name)
