"""Overlap: the trees of coming updates grow while earlier ones are learned."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from treegraft.rollout.rounds import Sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """What was sampled for an update."""

    sampled: Sampled
    num_drawn: int
    """Training tasks drawn before it and for it."""
    seconds: float
    """From the first tree's beginning to the last one's end."""


class Ahead(AbstractAsyncContextManager["Ahead"]):
    """Samples the updates of a run in their order.

    Update n is learned by weights of version n - 1. With `max_staleness` s its trees begin as soon
    as the engine samples from version n - 1 - s, so that no step of theirs is more than s versions
    older than the weights that learn from it; nothing is thrown away. Without (0) an update is
    sampled when it is taken, while nothing else happens.
    """

    def __init__(
        self,
        sample: Callable[[int, int], Awaitable[Sampled]],
        *,
        max_staleness: int,
        first: int,
        last: int,
        num_drawn: int,
        num_known: int | None,
    ) -> None:
        """Args:
        sample: returns the trees of (number of the update, tasks drawn before it).
        first, last: numbers of the next update and of the run's last one.
        num_drawn: tasks drawn before `first`.
        num_known: tasks that every update draws; None where its trees decide it, so that one
            update is sampled after the other.
        """
        self.max_staleness = max_staleness
        self._sample, self._num_known = sample, num_known
        self._first = self._next = first
        self._last, self._num_drawn = last, num_drawn
        self._growing: dict[int, asyncio.Task[Grown]] = {}
        self._newest: asyncio.Task[Grown] | None = None

    async def __aexit__(self, *_: object) -> None:
        """Gives up what is growing; a resumed run grows it anew from its keys."""
        for task in self._growing.values():
            task.cancel()
        await asyncio.gather(*self._growing.values(), return_exceptions=True)

    def begin(self, version: int) -> None:
        """Begins the updates that the engine's version is new enough for."""
        if self.max_staleness:
            self._begin_to(version + 1 + self.max_staleness)

    async def take(self, number: int) -> Grown:
        """Returns the trees of an update, once they have ended; each update is taken once."""
        self._begin_to(number)
        return await self._growing.pop(number)

    def _begin_to(self, last: int) -> None:
        while self._next <= min(last, self._last):
            grown = self._grown(self._next, self._newest)
            self._newest = self._growing[self._next] = asyncio.create_task(grown)
            self._next += 1

    async def _grown(self, number: int, before: asyncio.Task[Grown] | None) -> Grown:
        num_before = self._num_drawn
        if self._num_known is not None:
            num_before += (number - self._first) * self._num_known
        elif before is not None:
            # Not awaited itself: a cancelled wait would cancel it.
            await asyncio.wait({before})
            num_before = before.result().num_drawn
        began = time.monotonic()
        sampled = await self._sample(number, num_before)
        num_drawn, seconds = num_before + sampled.num_drawn, time.monotonic() - began
        return Grown(sampled=sampled, num_drawn=num_drawn, seconds=seconds)
