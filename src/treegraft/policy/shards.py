"""Tensors in safetensors files of which each holds some rows: one file for each rank, or one alone.

The metadata of a file say at which row of the whole tensor each of its tensors begins. So files of
any number of ranks are read by any other number.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from treegraft.core.errors import CheckpointError


def local_rows(tensor: Any) -> tuple[Tensor, int]:
    """Returns (the rows of a tensor that this process holds, the number of the first); of a plain
    tensor all."""
    if not hasattr(tensor, "to_local"):
        return tensor, 0
    local: Tensor = tensor.to_local()
    for dim, placement in enumerate(tensor.placements):
        if placement.is_shard():
            # As torch.chunk cuts: the last ranks have fewer rows, or none.
            size = -(-tensor.shape[0] // tensor.device_mesh.size(dim))
            return local, min(size * tensor.device_mesh.get_local_rank(dim), tensor.shape[0])
    return local, 0


def write_rows(path: Path, tensors: Mapping[str, Any], *, is_first: bool) -> None:
    """Writes the rows of each tensor that this process holds.

    Args:
        is_first: whether to write the tensors too that every process holds whole.
    """
    own = {}
    rows = {}
    for name, tensor in tensors.items():
        local, first = local_rows(tensor)
        if is_first or (local is not tensor and local.numel()):
            # Cloned: safetensors refuses tensors that share memory.
            own[name] = local.detach().cpu().contiguous().clone()
            rows[name] = first
    save_file(own, path, {"rows": json.dumps(rows)})


class TensorFiles:
    """The tensors of some files by name."""

    def __init__(self, paths: Iterable[Path]) -> None:
        """Opens the files.

        Raises:
            CheckpointError: a file cannot be read.
        """
        self._parts: dict[str, list[tuple[int, Any]]] = {}
        for path in paths:
            try:
                file: Any = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(
                    f"'{path}' could not be read ({error}); expected a safetensors file as it was"
                    " written. Take another checkpoint.",
                    code="shard-unreadable",
                ) from error
            rows = json.loads((file.metadata() or {}).get("rows", "{}"))
            for name in file.keys():  # noqa: SIM118, it is no dict
                self._parts.setdefault(name, []).append((rows.get(name, 0), file))

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def whole(self, name: str) -> Tensor:
        """Returns a tensor; a KeyError where no file has it."""
        parts = sorted(self._parts[name], key=lambda one: one[0])
        found = [file.get_tensor(name) for _, file in parts]
        return found[0] if len(found) == 1 else torch.cat(found)

    def rows(self, name: str, first: int, count: int) -> Tensor:
        """Returns `count` rows of a tensor; a KeyError where no file has them all."""
        found = []
        # By their rows: files are in the order of their names.
        for start, file in sorted(self._parts[name], key=lambda one: one[0]):
            part = file.get_slice(name)
            low = max(first - start, 0)
            high = min(first + count - start, part.get_shape()[0])
            if low < high:
                found.append(part[low:high])
        if sum(map(len, found)) != count:
            raise KeyError(f"{name}: rows {first} to {first + count - 1}")
        return torch.cat(found)

    def fill(self, name: str, tensor: Any) -> None:
        """Copies into a tensor the rows of it that this process holds."""
        local, first = local_rows(tensor)
        with torch.no_grad():
            if local is tensor:
                local.copy_(self.whole(name))
            elif local.numel():
                local.copy_(self.rows(name, first, local.shape[0]))
