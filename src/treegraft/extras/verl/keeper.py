"""What the workers of a training share, in one process: the Step-Trace Buffer that all trees are
grafted from, and the record of the trees."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from treegraft import Config, ScriptedEngine, Session, Task, Trace, Tree
from treegraft.parts import interfaces


class Keeper:
    """Holds the buffer, as one actor: its vectors and its encoder are in memory once."""

    def __init__(self, settings: str, folder: str) -> None:
        """Opens or makes the recipe's buffer.

        Args:
            settings: a configuration as JSON.
            folder: for trees and metrics; `treegraft view` shows it.
        """
        self._config = Config.model_validate_json(settings)
        self._folder = folder
        self._held = ExitStack()
        self._session = self._held.enter_context(
            Session(self._config, engine=no_engine(), learns=False)
        )
        self._trees: defaultdict[int, list[Tree]] = defaultdict(list)

    async def retrieve(
        self, task: Task, contents: Sequence[Any], whole: bool, noise_key: interfaces.NoiseKey
    ) -> interfaces.Retrieved | None:
        """Returns what `Retriever.retrieve` does."""
        if (found := self._session.retriever) is None:
            return None
        ask = partial(found.retrieve, task, contents, whole=whole, noise_key=noise_key)
        return await self._session.arun(ask)

    async def trajectories(self, task: Task) -> Sequence[tuple[Trace, ...]]:
        """Returns what `Retriever.trajectories` does."""
        found = self._session.retriever
        return () if found is None else await self._session.arun(found.trajectories, task)

    async def add(self, tree: Tree, number: int) -> None:
        """Takes a tree of a step."""
        self._trees[number].append(tree)

    async def learned(self, number: int) -> dict[str, float]:
        """Records the trees of a step, adds the best to the buffer where the recipe says so, and
        returns the metrics of the trees; after learning, so that no tree finds its own steps."""
        # Sorted: workers finish in any order, and records shall not depend on it.
        trees = sorted(self._trees.pop(number, []), key=lambda tree: tree.group_id)
        # Before the metrics, which count what was added.
        self._session.remember(trees, number)
        metrics = self._session.pop_metrics(trees) if trees else {}
        kept = trees if self._config.track.record_trees else []
        self._session.record(self._folder, kept, number, metrics)
        return metrics

    async def close(self) -> None:
        """Closes the buffer."""
        self._held.close()


def no_engine() -> ScriptedEngine:
    """Returns an engine that gets no request."""
    tokenizer: Any = None
    return ScriptedEngine([], tokenizer)


class KeptBuffer:
    """Retrieves from a `Keeper` in another process (a `Retriever`)."""

    def __init__(self, keeper: Any) -> None:
        """Args: keeper: the handle of the actor."""
        self._keeper = keeper

    async def retrieve(
        self, task: Task, contents: Sequence[Any], *, whole: bool, noise_key: interfaces.NoiseKey
    ) -> interfaces.Retrieved | None:
        """Returns the trace whose key is nearest, see `Retriever`."""
        found: interfaces.Retrieved | None = await self._keeper.retrieve.remote(
            task, list(contents), whole, noise_key
        )
        return found

    async def trajectories(self, task: Task) -> Sequence[tuple[Trace, ...]]:
        """Returns the stored trajectories of a task, see `Retriever`."""
        found: Sequence[tuple[Trace, ...]] = await self._keeper.trajectories.remote(task)
        return found

    def take_metrics(self) -> dict[str, float]:
        """Returns nothing: the keeper counts."""
        return {}
