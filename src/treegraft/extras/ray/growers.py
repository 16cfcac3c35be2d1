"""Growers as actors: whole trees grow in them, by the engines of the cluster."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from contextvars import ContextVar
from dataclasses import asdict, replace
from functools import partial
from typing import Any, cast

from treegraft.assemble import Parts, assemble
from treegraft.core.errors import DeadlineExceeded, EngineError
from treegraft.core.interfaces import Explorer, NoiseKey
from treegraft.core.sessions import COUNTS
from treegraft.core.spans import carrier, joined, span
from treegraft.core.types import Filters, Task, Tree
from treegraft.explore.build import build_explorer
from treegraft.explore.independent import Independent
from treegraft.extras.ray.actors import Actor, replying
from treegraft.extras.ray.buffer import ReplicaRetriever, States
from treegraft.extras.ray.pool import Pool
from treegraft.extras.ray.remote_engine import ClusterEngine
from treegraft.extras.ray.supervisor import START_S, Keeper
from treegraft.extras.ray.tools import remote_tools
from treegraft.rollout.limits import Limits
from treegraft.rollout.loop import Grower
from treegraft.rollout.watch import Watch
from treegraft.runs.tree_json import task_from_json, task_to_json, tree_from_json, tree_to_json
from treegraft.settings.config import Config
from treegraft.tools.build import MakeTools, build_tools
from treegraft.tools.toolbox import Toolbox
from treegraft.traces.retrieve import BufferRetriever

_COUNTS = ("num_grafts_without_room", "num_untrue_stored", "num_failed_stored")
"""What a `Grower` counts."""
_STATE: ContextVar[str | None] = ContextVar("state", default=None)
"""The state of the buffer that the trees of a `grow_all` are grafted from: those of several updates
may grow at once."""


class GrowerActor(Actor):
    """Grows trees with all that needs no weights: prompts, tools, rewards."""

    def __init__(self, role: str, number: int, place: str) -> None:
        super().__init__(role, number, place)
        self.config = Config.model_validate_json(self.place.config)
        self._stack = AsyncExitStack()
        self._parts: Parts | None = None
        self._engine: ClusterEngine | None = None
        self._explorer: Explorer | None = None
        """The recipe's, once it is asked for."""
        self._told = asyncio.Event()
        self._workers: Pool | None = None
        self._replicas: Pool | None = None
        self._watch = Watch()
        self._num_trees, self._route = 0, -1

    def more(self) -> dict[str, Any]:
        """Returns the route that it knows, how many trees grow, and what they wait for."""
        return {
            "is_open": self._parts is not None,
            "route": self._route,
            "trees": self._num_trees,
            "waits": {owner: num for owner, num in self._watch.waits.items() if num},
        }

    @replying
    async def open(
        self,
        max_context: int | None,
        facts: str = "[]",
        workers: Sequence[Any] = (),
        replicas: Sequence[Any] = (),
    ) -> None:
        """Makes the parts that trees need beside engines.

        Args:
            facts: of `ToolWorker.describe`, in JSON.
            workers, replicas: tool workers and buffer replicas; without any, tools run here, and
                nothing is grafted.
        """
        if self._parts is not None:
            return
        engine = ClusterEngine(self.config.engine, max_context=max_context)
        make_tools: MakeTools = build_tools
        patience_s = self.config.rollout.deadline_s
        if workers:
            self._workers = Pool(workers, "tool workers", patience_s)
            make_tools = partial(remote_tools, json.loads(facts), self._workers, patience_s)
        self._replicas = Pool(replicas, "buffer replicas", patience_s) if replicas else None
        making = assemble(
            self.config,
            model_path=self.place.model_path,
            engine=engine,
            make_tools=make_tools,
        )
        self._parts = await self._stack.enter_async_context(making)
        self._engine = engine

    @replying
    async def take(
        self,
        route: int,
        edition: int,
        version: int,
        numbers: list[int],
        engines: list[Any],
        workers: Sequence[Any] = (),
        replicas: Sequence[Any] = (),
    ) -> None:
        """Takes over which engines answer, and by which weights; and which tool
        workers and buffer replicas there are."""
        if self._engine is None:
            raise EngineError("grower: it is not open yet")
        self._engine.take(edition, version, dict(zip(numbers, engines, strict=True)))
        for pool, handles in ((self._workers, workers), (self._replicas, replicas)):
            if pool is not None:
                pool.take(handles)
        self._route = route
        self._told.set()
        self._told.clear()

    @replying
    async def grow(self, order: str) -> dict[str, Any]:
        """Returns one tree, scored, and what was counted for it."""
        asked = json.loads(order)
        with joined(asked["trace"], self.name), span("grow", group_id=asked["group_id"]):
            return await self._grown(asked)

    async def _grown(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        await self._reached(asked["edition"])
        assert self._engine is not None
        grower = self._grower(asked["kind"])
        # This tree's alone: what else is under way may die with this process, and grow again.
        usage: dict[str, Any] = {}
        COUNTS.set(usage)
        self._num_trees += 1
        try:
            tree = await grower.grow(
                self._task(asked), noise_key=tuple(asked["key"]), group_id=asked["group_id"]
            )
        finally:
            self._num_trees -= 1
        asked_engines = dict(self._engine.counts)
        self._engine.counts.clear()
        return {
            "tree": tree_to_json(tree),
            "counts": {name: getattr(grower, name) for name in _COUNTS},
            "engine": asked_engines,
            "usage": {name: asdict(one) for name, one in usage.items()},
            "retrieved": {} if grower.retriever is None else grower.retriever.take_metrics(),
        }

    async def _reached(self, edition: int) -> None:
        """Waits until it knows the engines that hold these weights: it may be asked before it is
        told of a publish or, started anew, before it is opened."""
        try:
            async with asyncio.timeout(START_S):
                while self._engine is None or self._engine.edition < edition:
                    await self._told.wait()
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"grower {self.number}: it was not told of the latest weights within"
                f" {START_S:.0f} s; see the warnings about it, and go on with --resume."
            ) from error

    def _grower(self, kind: Mapping[str, Any]) -> Grower:
        """The grower of one tree, whose counts are that tree's."""
        parts, config = self._parts, self.config
        assert parts is not None
        explores = kind["explores"]
        if explores and self._explorer is None:
            self._explorer = build_explorer(
                config.explore, vocab_size=len(parts.tokenizer), penalty=config.reward.penalty
            )
        explorer = self._explorer if explores and self._explorer is not None else Independent()
        limits = Limits(**{**kind["limits"], "filters": Filters(**kind["limits"]["filters"])})
        retriever = None
        if kind["state"] is not None and self._replicas is not None:
            retriever = ReplicaRetriever(self._replicas, config.buffer, kind["state"])
        grower = parts.grower(explorer, limits, retriever)
        grower.watch = self._watch
        return grower

    def _task(self, asked: Mapping[str, Any]) -> Task:
        """The task as it was sent or, where that is not all of it, the one of its own data."""
        task = task_from_json(asked["task"])
        if asked["is_whole"]:
            return task
        assert self._parts is not None
        for known in (*self._parts.train_tasks, *self._parts.eval_tasks):
            if known.id == task.id and task_to_json(known) == asked["task"]:
                return known
        return task

    async def end(self) -> None:
        """Ends tools and environments."""
        await self._stack.aclose()


class ClusterGrower(Grower):
    """A `Grower` whose trees grow in the growers of a cluster."""

    def __init__(self, keeper: Keeper, states: States | None, *parts: Any, **more: Any) -> None:
        """Args:
        states: of the buffer, for the replicas; None without any.
        parts, more: as of `Grower`.
        """
        super().__init__(*parts, **more)
        self._keeper, self._states = keeper, states

    async def grow_all(self, *args: Any, **more: Any) -> list[Tree]:
        """As `Grower.grow_all`; all of its trees are grafted from the buffer as it is now."""
        state = None
        if self._states is not None and isinstance(self.retriever, BufferRetriever):
            state = await asyncio.to_thread(self._states.take, self.retriever.buffer)
        _STATE.set(state)
        return await super().grow_all(*args, **more)

    async def grow(self, task: Task, *, noise_key: NoiseKey, group_id: str) -> Tree:
        """Returns one tree, scored; where the grower of it has died, another one's."""
        sent = task_to_json(task)
        order = {
            "task": sent,
            "is_whole": task_from_json(sent) == task,
            "key": list(noise_key),
            "group_id": group_id,
            "edition": self._keeper.engine.edition,
            "trace": carrier(),
            "kind": {
                "explores": not _is_plain(self.explorer),
                "limits": asdict(self.limits),
                "state": _STATE.get(),
            },
        }
        with self.watch.waiting("growers"):
            found = await self._keeper.grow(json.dumps(order), group_id)
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + found["counts"][name])
        self._keeper.engine.counts.update(found["engine"])
        if isinstance(self.retriever, BufferRetriever):
            self.retriever.count(found["retrieved"])
        cast(Toolbox, self.toolbox).add_usage(found["usage"])
        tree = tree_from_json(found["tree"])
        is_unchanged = not order["is_whole"] and task_to_json(tree.task) == sent
        return replace(tree, task=task) if is_unchanged else tree


def _is_plain(explorer: Explorer) -> bool:
    """Whether it is the explorer of evaluations."""
    return type(explorer) is Independent and not explorer.has_stages
