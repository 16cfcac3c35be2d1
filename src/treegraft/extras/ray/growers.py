"""Growers as actors: whole trees grow in them, by the engines of the cluster."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

from treegraft import Config
from treegraft.extras.ray.actors import Actor, replying
from treegraft.extras.ray.remote_engine import ClusterEngine
from treegraft.extras.ray.supervisor import START_S
from treegraft.parts import errors, remote, spans


class GrowerActor(Actor):
    """Grows trees with all that needs no weights: prompts, tools, rewards."""

    def __init__(self, role: str, number: int, place: str) -> None:
        super().__init__(role, number, place)
        self.config = Config.model_validate_json(self.place.config)
        self._stack = AsyncExitStack()
        self._host: remote.TreeHost | None = None
        self._engine: ClusterEngine | None = None
        self._told = asyncio.Event()
        self._route = -1

    def more(self) -> dict[str, Any]:
        """Returns the route that it knows, how many trees grow, and what they wait for."""
        host = self._host
        return {
            "is_open": host is not None,
            "route": self._route,
            "trees": 0 if host is None else host.num_trees,
            "waits": {} if host is None else host.waits,
        }

    @replying
    async def open(self, max_context: int | None) -> None:
        """Makes the parts that trees need beside engines."""
        if self._host is not None:
            return
        engine = ClusterEngine(self.config, max_context=max_context)
        making = remote.TreeHost.opened(self.config, engine, model_path=self.place.model_path)
        self._host = await self._stack.enter_async_context(making)
        self._engine = engine

    @replying
    async def take(
        self, route: int, edition: int, version: int, numbers: list[int], engines: list[Any]
    ) -> None:
        """Takes over which engines answer, and by which weights."""
        if self._engine is None:
            raise errors.EngineError("grower: it is not open yet", code="grower-not-open")
        self._engine.take(edition, version, dict(zip(numbers, engines, strict=True)))
        self._route = route
        self._told.set()
        self._told.clear()

    @replying
    async def grow(self, order: str) -> dict[str, Any]:
        """Returns one tree, scored, and what was counted for it; see `TreeHost.grow`."""
        asked = json.loads(order)
        where = spans.joined(asked["trace"], self.name)
        with where, spans.span("grow", group_id=asked["group_id"]):
            await self._reached(asked["edition"])
            assert self._host is not None and self._engine is not None
            found = await self._host.grow(asked)
            found["engine"] = dict(self._engine.counts)
            self._engine.counts.clear()
            return found

    async def _reached(self, edition: int) -> None:
        """Waits until it knows the engines that hold these weights: it may be asked before it is
        told of a publish or, started anew, before it is opened."""
        try:
            async with asyncio.timeout(START_S):
                while self._engine is None or self._engine.edition < edition:
                    await self._told.wait()
        except TimeoutError as error:
            raise errors.DeadlineExceeded(
                f"grower {self.number}: it was not told of the latest weights within"
                f" {START_S:.0f} s; see the warnings about it, and go on with --resume.",
                code="grower-late",
            ) from error

    async def end(self) -> None:
        """Ends tools and environments."""
        await self._stack.aclose()
