"""What tests of whole runs name by import path: a slow tool, an engine of known habits, an explorer
that remembers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from treegraft.core.errors import ToolUnavailable, TreegraftError
from treegraft.core.interfaces import Request, Tool, WeightSource
from treegraft.core.types import Completion, Start, Task, Tree
from treegraft.core.workers import WorkerPool
from treegraft.explore.independent import Independent
from treegraft.policy.engine.scripted import ScriptedEngine
from treegraft.settings.tasks import SearchWorldSettings
from treegraft.tasks.search_world import SearchWorld, WorldSearch

WORLD = SearchWorldSettings(hops=[1, 2], num_entities=8, num_relations=5)


class SlowSearch(WorldSearch):
    """Takes a different time at every call. Not cacheable: the same words mean different facts in
    different worlds."""

    luck = random.Random()
    longest_s = 0.03

    async def __call__(self, body: str, task: Task) -> str:
        await asyncio.sleep(self.luck.random() * self.longest_s)
        return await super().__call__(body, task)


class SlowWorld(SearchWorld):
    """A search world with that tool."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(WORLD, **kwargs)

    def tools(self) -> Sequence[Tool]:
        return (SlowSearch(WORLD, self._train_world.seed),)


class PooledSearch(WorldSearch):
    """Sends every query through a child process; where that dies, through another one."""

    pool = WorkerPool(
        Path(__file__).with_name("echo_worker.py"), 1, task="repeats queries", package="json"
    )

    async def __call__(self, body: str, task: Task) -> str:
        for _ in range(50):
            with suppress(TreegraftError):  # killed before it was ready
                if await asyncio.to_thread(self.pool.ask, body, 10.0) == body:
                    return await super().__call__(body, task)
        raise ToolUnavailable("no child process repeats the query")


class PooledWorld(SearchWorld):
    """A search world with that tool."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(WORLD, **kwargs)

    def tools(self) -> Sequence[Tool]:
        return (PooledSearch(WORLD, self._train_world.seed),)


class BadSearch(WorldSearch):
    """Does to each entity something else that tools should not do."""

    async def __call__(self, body: str, task: Task) -> Any:
        number = int("0" + "".join(filter(str.isdigit, body.split()[0] if body.split() else "")))
        if number % 4 == 0:
            raise ZeroDivisionError("the tool is broken")
        if number % 4 == 1:
            await asyncio.sleep(3600)
        return "e1 " * 33_000_000 if number % 4 == 2 else bytes(range(256)) * 4


class BadWorld(SlowWorld):
    """A search world with that tool."""

    def tools(self) -> Sequence[Tool]:
        return (BadSearch(WORLD, self._train_world.seed),)


ANSWERS: dict[str, str] = {}
"""The right answer by question, filled in by the test."""


class Habits:
    """Answers right at once, but wrong in the first start of each training tree."""

    def __init__(self, tokenizer: Any) -> None:
        self._right = ScriptedEngine(
            lambda path: f"<answer> \\boxed{{ {ANSWERS[path.strip()]} }} </answer>", tokenizer
        )
        self._wrong = ScriptedEngine(
            lambda path: "<answer> \\boxed{ unknown } </answer>", tokenizer
        )
        self.policy_version = 0
        self.capacity = 64
        self.fingerprint = ""
        self.death = None
        self.max_context = None

    async def complete(self, request: Request) -> Completion:
        key = request.noise_key
        engine = self._wrong if key[1] == "train" and key[-1] == "0.0" else self._right
        return await engine.complete(request)

    async def publish(self, source: WeightSource, version: int) -> None:
        """Takes the version."""
        self.policy_version = version
        for engine in (self._right, self._wrong):
            await engine.publish(source, version)

    def take_metrics(self) -> dict[str, float]:
        """Returns nothing."""
        return {}

    async def close(self) -> None:
        """Has nothing to close."""


def make_habits(*, tokenizer: Any, **_: Any) -> Habits:
    """Returns the engine for `engine.kind = "tests.support.tiny_parts:make_habits"`."""
    return Habits(tokenizer)


ASKED: list[str] = []
"""The trees that the explorer below was asked about."""


class OneByOne(Independent):
    """Opens one start, then the others one after another."""

    def starts(self, max_leaves: int) -> Start:
        return Start(1)

    def fill(self, tree: Tree, max_leaves: int) -> Start:
        ASKED.append(tree.group_id)
        return Start(1)


def always_half(completions: list[str], **_: Any) -> list[float]:
    """A reward that teaches nothing."""
    return [0.5 for _ in completions]


def by_text(completions: Sequence[str], **_: Any) -> list[float]:
    """A reward that differs among texts, whatever the agent has learned: by their length, and among
    those of one length by their letters."""
    return [len(one) % 7 / 7 + sum(map(ord, one)) % 11 / 1000 for one in completions]
