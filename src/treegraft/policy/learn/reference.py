"""The reference of the KL term: the policy before the first update, frozen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from treegraft.core.errors import CheckpointError
from treegraft.policy.shards import TensorFiles, local_rows, write_rows

STEM = "reference"
"""Beginning of the names of its files."""


class Reference:
    """A frozen copy of the weights that a model learns; with adapters, of these alone."""

    def __init__(self, model: Any) -> None:
        # Frozen weights under adapters are the same in policy and reference.
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
            # In the memory itself, from which a divided weight is gathered for a pass.
            local = local_rows(weight)[0].detach()
            kept = local_rows(self._kept[name])[0]
            now = local.clone()
            local.copy_(kept)
            kept.copy_(now)

    @staticmethod
    def clear(folder: Path) -> None:
        """Deletes what another number of ranks may have left: `load` reads every file."""
        for old in folder.glob(f"{STEM}*"):
            old.unlink()

    def save(self, folder: Path, suffix: str = "", *, is_first: bool = True) -> None:
        """Writes the weights, for a resumed run; see `write_rows`."""
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".reference{suffix}.partial"
        write_rows(partial, self._kept, is_first=is_first)
        # Renamed when complete: a run killed meanwhile must not be resumed with half of it.
        partial.replace(folder / f"{STEM}{suffix}.safetensors")

    def load(self, folder: Path) -> None:
        """Takes the weights that `save` wrote, whatever number of ranks did.

        Raises:
            CheckpointError: they are missing.
        """
        files = TensorFiles(sorted(folder.glob(f"{STEM}*.safetensors")))
        try:
            for name, kept in self._kept.items():
                files.fill(name, kept)
        except KeyError as error:
            raise CheckpointError(
                f"'{folder / STEM}.safetensors' is missing or lacks {error}; a run with"
                " loss.kl_coef > 0 cannot be resumed without its reference",
                code="reference-missing",
            ) from error
