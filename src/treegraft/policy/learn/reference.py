"""The reference of the KL term: the policy before the first update, frozen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from treegraft.core.errors import CheckpointError

FILE = "reference.safetensors"


class Reference:
    """A frozen copy of the weights that a model learns; with adapters, of these alone."""

    def __init__(self, model: Any) -> None:
        self._weights = {
            name: weight for name, weight in model.named_parameters() if weight.requires_grad
        }
        self._kept = {name: weight.detach().clone() for name, weight in self._weights.items()}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Gives the model these weights for the time of the block."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for name, weight in self._weights.items():
            weight.data, self._kept[name] = self._kept[name], weight.data

    def save(self, folder: Path) -> None:
        """Writes the weights, for a resumed run."""
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / ".reference.partial"
        save_file({name: kept.contiguous() for name, kept in self._kept.items()}, partial)
        # Renamed when complete: a run killed meanwhile must not be resumed with half of it.
        partial.replace(folder / FILE)

    def load(self, folder: Path) -> None:
        """Takes the weights that `save` wrote.

        Raises:
            CheckpointError: they are missing.
        """
        path = folder / FILE
        if not path.exists():
            raise CheckpointError(
                f"'{path}' is missing; a run with loss.kl_coef > 0 cannot be resumed without its"
                " reference"
            )
        found = load_file(path)
        with torch.no_grad():
            for name, kept in self._kept.items():
                kept.copy_(found[name])
