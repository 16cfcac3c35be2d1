"""The reference of the KL term: the policy before the first update, frozen."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from treegraft.core.errors import CheckpointError
from treegraft.policy.head import Head

FILE = "reference.safetensors"


class Reference:
    """A frozen copy of a model and its head."""

    def __init__(self, model: Any) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.head = Head(self.model)

    def save(self, folder: Path) -> None:
        """Writes the weights, for a resumed run."""
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / ".reference.partial"
        # Tied weights share memory, which safetensors refuses.
        weights = {
            name: tensor.contiguous().clone() for name, tensor in self.model.state_dict().items()
        }
        save_file(weights, partial)
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
        self.model.load_state_dict(load_file(path))
