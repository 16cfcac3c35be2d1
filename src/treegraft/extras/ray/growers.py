"""Growers as actors: whole trees grow in them, by the engines of the cluster."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

from treegraft import Config
from treegraft.extras.ray.actors import Actor, replying
from treegraft.extras.ray.remote_engine import ClusterEngine
from treegraft.parts import remote, spans


class GrowerActor(Actor):
    """Grows trees with all that needs no weights: prompts, tools, rewards."""

    def __init__(self, role: str, number: int, place: str) -> None:
        super().__init__(role, number, place)
        self._stack = AsyncExitStack()
        self._host: remote.TreeHost | None = None
        self._engine: ClusterEngine | None = None
        self._num_told = 0

    def more(self) -> dict[str, Any]:
        """Returns what its trees wait for."""
        return {"waits": {} if self._host is None else self._host.waits}

    async def begin(self, max_context: int | None) -> None:
        """Makes the parts that trees need beside engines."""
        config = Config.model_validate_json(self.place.config)
        self._engine = ClusterEngine(config, max_context=max_context)
        making = remote.TreeHost.opened(config, self._engine, model_path=self.place.model_path)
        self._host = await self._stack.enter_async_context(making)

    async def take(
        self, told: int, edition: int, version: int, numbers: list[int], engines: list[Any]
    ) -> None:
        """Takes over which engines answer, and by which weights.

        Args:
            told: number of this news; older ones that come later change nothing.
        """
        assert self._engine is not None, "rank 0 tells growers that are open"
        if told > self._num_told:
            self._num_told = told
            self._engine.take(edition, version, dict(zip(numbers, engines, strict=True)))

    @replying
    async def grow(self, order: str, *told: Any) -> dict[str, Any]:
        """Returns one tree, scored, and what was counted for it; see `TreeHost.grow`.

        Args:
            told: as for `take`: the news of rank 0 may be on its way still.
        """
        asked = json.loads(order)
        await self.take(*told)
        assert self._host is not None and self._engine is not None
        with (
            spans.joined(asked["trace"], self.name),
            spans.span("grow", group_id=asked["group_id"]),
        ):
            found = await self._host.grow(asked)
        found["engine"] = dict(self._engine.counts)
        self._engine.counts.clear()
        return found

    async def end(self) -> None:
        """Ends tools and environments."""
        await self._stack.aclose()
