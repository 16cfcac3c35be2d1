"""A placement: where the engines and growers of a run stand, if not in the run's own process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from treegraft.core.interfaces import Engine, Explorer, Format, Retriever, TreeScorer
from treegraft.core.sessions import SessionOpener
from treegraft.explore.budget import Allocation, Budget
from treegraft.rollout.limits import Limits
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

    def grower(
        self,
        engine: Engine,
        format: Format,
        toolbox: SessionOpener,
        explorer: Explorer,
        limits: Limits,
        scorer: TreeScorer,
        *,
        retriever: Retriever | None,
        allocate: Callable[[Budget], Allocation],
    ) -> Grower:
        """Returns a grower, made of the same parts, whose trees grow there."""

    def show_in(self, folder: Path) -> None:
        """Writes what stands there, and how it is, into this run folder from now on."""
