"""A search world whose tool takes its time, so that a test can do something meanwhile."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Sequence
from typing import Any

from tests.support.tiny_parts import WORLD

from treegraft.core.interfaces import Tool
from treegraft.core.types import Task
from treegraft.tasks.search_world import SearchWorld, WorldSearch

LONGEST = "TREEGRAFT_TEST_LONGEST_S"
"""Environment variable: the longest time of a search, in seconds."""


class SlowSearch(WorldSearch):
    """Takes another time at every call."""

    luck = random.Random()

    async def __call__(self, body: str, task: Task) -> str:
        await asyncio.sleep(self.luck.random() * float(os.environ.get(LONGEST, "0")))
        return await super().__call__(body, task)


class SlowWorld(SearchWorld):
    """A search world with that tool."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(WORLD, **kwargs)

    def tools(self) -> Sequence[Tool]:
        return (SlowSearch(WORLD, self._train_world.seed),)
