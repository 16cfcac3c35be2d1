"""The names of a session that were in use until 0.8, for one release more."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from treegraft.core.interfaces import Engine, Retriever
from treegraft.core.types import Task, Tree
from treegraft.rollout.measure import rollout_metrics, unused_metrics
from treegraft.runs.checkpoint import TrainState
from treegraft.session import Session, Weights
from treegraft.settings.config import Config
from treegraft.settings.objects import Objects


def grove(
    recipe_or_config: Config | Mapping[str, Any] | str | Path,
    *,
    engine: Engine | None = None,
    retriever: Retriever | None = None,
    **objects: Unpack[Objects],
) -> Grove:
    """Returns a `Session` with the methods that it had until 0.8; use `treegraft.Session`."""
    warnings.warn(
        "grove(...) is now treegraft.Session(...), and goes with 0.9: grow is sample and credit,"
        " publish is sync_weights, take_metrics is pop_metrics",
        FutureWarning,
        stacklevel=2,
    )
    return Grove(recipe_or_config, engine=engine, retriever=retriever, learns=False, **objects)


class Grove(Session):
    """A session with its methods until 0.8."""

    def grow(self, tasks: Sequence[Task], number: int) -> list[Tree]:
        """Returns `sample` and `credit` of tasks."""
        return list(self.credit(self.sample(number, tasks)))

    async def agrow(self, tasks: Sequence[Task], number: int) -> list[Tree]:
        """Returns the same, awaited."""
        return list(self.credit(await self.asample(number, tasks)))

    def publish(self, weights: Weights | None, version: int) -> None:
        """Gives the engine weights."""
        self._wait(self._handed, version, weights)

    async def apublish(self, weights: Weights | None, version: int) -> None:
        """Does the same, awaited."""
        await self.arun(self._handed, version, weights)

    def take_metrics(self, trees: Sequence[Tree]) -> dict[str, float]:
        """Returns the metrics of trees, tools, engine and retrieval."""
        found = rollout_metrics(trees)
        found |= unused_metrics(trees, self.explorer, self.config.explore.num_leaves)
        for part in (self.parts, self.grower, self.buffer):
            found |= {} if part is None else part.take_metrics()
        return found

    def save(self, folder: Path | str, number: int | TrainState | None = None) -> None:
        """Writes a checkpoint of an update."""
        if isinstance(number, int):
            self.update = number
        super().save(folder)
