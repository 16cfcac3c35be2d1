"""A placement: the processes or machines of a run's engines and growers, if not the run's own
process."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

from treegraft.core.interfaces import Engine
from treegraft.rollout.loop import Grower
from treegraft.settings.config import Config


class Placement(Protocol):
    """Engines and growers of a run in other processes, on one machine or on many."""

    def engine(
        self, config: Config, model_path: Path | str | None
    ) -> AbstractAsyncContextManager[Engine]:
        """Holds one engine for all that stand there, and whatever grows trees with it.

        Args:
            model_path: where they begin with weights and tokenizer; None for model.path.

        Raises:
            TreegraftError: a part that cannot be made there.
        """

    def grower(self, *parts: Any, **more: Any) -> Grower:
        """Returns a grower, made of the same parts as `Grower`, whose trees grow there."""

    def show_in(self, folder: Path) -> None:
        """Writes what stands there, and how it is, into this run folder from now on."""
