"""Trees that grow in other processes: requests, replies, and the states of the Step-Trace Buffer.

Only the run's process writes the buffer. A state is a file that is written once, in a folder that
all processes see, and never changes. A tree therefore gets the same answers in every process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self, cast

from treegraft.assemble import Parts
from treegraft.core.interfaces import Engine, Explorer, NoiseKey
from treegraft.core.sessions import COUNTS
from treegraft.core.types import Filters, Task, Tree
from treegraft.explore.build import build_explorer
from treegraft.explore.independent import Independent
from treegraft.rollout.limits import Limits
from treegraft.rollout.loop import Grower
from treegraft.runs.tree_json import task_from_json, task_to_json, tree_from_json, tree_to_json
from treegraft.settings.config import Config
from treegraft.tools.search.encoders import Encoder
from treegraft.tools.toolbox import Toolbox
from treegraft.traces.buffer import TraceBuffer
from treegraft.traces.retrieve import BufferRetriever
from treegraft.traces.rollout_buffer import may_retrieve

Ask = Callable[[dict[str, Any], str], Awaitable[Mapping[str, Any]]]
"""Sends an order for a tree, which JSON can hold, to any `TreeHost`, and returns its reply; also
gets the tree's name, for errors."""
_STATE: ContextVar[str | None] = ContextVar("state", default=None)
"""The state of the buffer that the trees of a `grow_all` are grafted from."""


# ------------------------------------------------------------------ the run's own process


class RemoteTrees:
    """The trees of a run that grow elsewhere, for a `Placement`."""

    def __init__(self, config: Config, ask: Ask) -> None:
        self._may_retrieve = may_retrieve(config)
        self._ask = ask
        self._states: BufferStates | None = None

    def show_in(self, folder: Path) -> None:
        """Keeps the states of the buffer in this run folder."""
        if self._may_retrieve:
            self._states = BufferStates(folder / "buffer" / "states")

    def grower(self, *parts: Any, **more: Any) -> Grower:
        """Returns a grower of the same parts as `Grower` whose trees grow elsewhere."""
        return _RemoteGrower(self._ask, self._states, *parts, **more)

    def close(self) -> None:
        """Removes the states of the buffer."""
        if self._states is not None:
            self._states.close()


class BufferStates:
    """The present state of a run's buffer as a file."""

    def __init__(self, folder: Path) -> None:
        """Args: folder: for these files alone. What an earlier process has left there goes."""
        self._folder = folder
        self._path: Path | None = None
        self._lock = threading.Lock()
        # A run that was killed leaves its states, each as large as the buffer.
        for path in folder.glob("*.sqlite"):
            path.unlink()

    def take(self, buffer: TraceBuffer) -> str:
        """Returns the path of the buffer's present state, written where it is new; from any thread.

        Raises:
            DataError: the file cannot be written.
        """
        with self._lock:
            path = (self._folder / f"{buffer.num_changes}.sqlite").absolute()
            # Once for each state: an update has many trees. All those of the last one have ended.
            if path != self._path:
                self.close()
                buffer.copy_to(path)
                self._path = path
            return str(path)

    def close(self) -> None:
        """Removes the file."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


class _RemoteGrower(Grower):
    def __init__(self, ask: Ask, states: BufferStates | None, *parts: Any, **more: Any) -> None:
        super().__init__(*parts, **more)
        self._ask = ask
        self._states = states

    async def grow_all(self, *args: Any, **more: Any) -> list[Tree]:
        """As `Grower.grow_all`; all of its trees are grafted from the buffer as it is now."""
        state = None
        if self._states is not None and isinstance(self.retriever, BufferRetriever):
            state = await asyncio.to_thread(self._states.take, self.retriever.buffer)
        _STATE.set(state)
        return await super().grow_all(*args, **more)

    async def grow(self, task: Task, *, noise_key: NoiseKey, group_id: str) -> Tree:
        """As `Grower.grow`."""
        sent = task_to_json(task)
        order = {
            "task": sent,
            "key": list(noise_key),
            "group_id": group_id,
            "explores": not _is_of_evaluations(self.explorer),
            "limits": asdict(self.limits),
            "state": _STATE.get(),
        }
        with self.watch.waiting("other processes"):
            found = await self._ask(order, group_id)
        self.num_grafts_without_room += found["num_grafts_without_room"]
        if isinstance(self.retriever, BufferRetriever):
            self.retriever.count(found["retrieved"])
        cast(Toolbox, self.toolbox).add_usage(found["usage"])
        tree = tree_from_json(found["tree"])
        # JSON may not hold all of a task's columns.
        return replace(tree, task=task) if task_to_json(tree.task) == sent else tree


def _is_of_evaluations(explorer: Explorer) -> bool:
    return type(explorer) is Independent and not explorer.has_stages


# ------------------------------------------------------------------ the other processes


class TreeHost:
    """Grows the trees that a run in another process orders: it writes prompts, runs tools and
    scores, and requests tokens of an engine."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._explorer: Explorer | None = None
        """The recipe's, once it is asked for."""
        self._buffer = _OpenState(parts)

    @classmethod
    @asynccontextmanager
    async def opened(
        cls, config: Config, engine: Engine, *, model_path: Path | str | None = None
    ) -> AsyncIterator[Self]:
        """Opens a host with all that trees need apart from an engine.

        Args:
            engine: stays its owner's to close.
            model_path: where the tokenizer is read; None for model.path.

        Raises:
            TreegraftError: a part that cannot be made.
        """
        async with Parts.build(config, model_path=model_path, engine=engine) as parts:
            host = cls(parts)
            try:
                yield host
            finally:
                host._buffer.close()

    async def grow(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Returns one tree, scored, and what was counted for it, as JSON can hold it."""
        state = order["state"]
        retriever = None if state is None else await self._buffer.at(state)
        grower = self._grower(order, retriever)
        # This tree's alone: what else is under way may die with this process, and grow again.
        usage: dict[str, Any] = {}
        token = COUNTS.set(usage)
        try:
            tree = await grower.grow(
                self._task(order), noise_key=tuple(order["key"]), group_id=order["group_id"]
            )
        finally:
            COUNTS.reset(token)
        return {
            "tree": tree_to_json(tree),
            "num_grafts_without_room": grower.num_grafts_without_room,
            "usage": {name: asdict(one) for name, one in usage.items()},
            # Of other trees under way too: the run adds the counts of all, so none is lost.
            "retrieved": retriever.take_counts() if retriever else {},
        }

    def _grower(self, order: Mapping[str, Any], retriever: BufferRetriever | None) -> Grower:
        """The grower of one tree, whose counts are that tree's."""
        parts = self._parts
        config = parts.config
        # Once: it is pure, so all trees may share it.
        if order["explores"] and self._explorer is None:
            self._explorer = build_explorer(
                config.explore, vocab_size=len(parts.tokenizer), penalty=config.reward.penalty
            )
        explorer = self._explorer if order["explores"] else None
        limits = Limits(**{**order["limits"], "filters": Filters(**order["limits"]["filters"])})
        return parts.grower(explorer or Independent(), limits, retriever)

    def _task(self, order: Mapping[str, Any]) -> Task:
        """The task that was sent: one of this process's own, with all its columns, if it has it."""
        task = task_from_json(order["task"])
        known = self._tasks.get(task.id, task)
        return known if task_to_json(known) == order["task"] else task

    @cached_property
    def _tasks(self) -> dict[str, Task]:
        return {task.id: task for task in (*self._parts.train_tasks, *self._parts.eval_tasks)}


class _OpenState:
    """The state that trees are grafted from; the next one has the same encoder."""

    def __init__(self, parts: Parts) -> None:
        self._settings = parts.config.buffer
        self._is_tried = parts.kind is not None
        self._state = ""
        self._retriever: BufferRetriever | None = None
        self._encoder: Encoder | None = None
        self._opening = asyncio.Lock()

    async def at(self, state: str) -> BufferRetriever:
        """Returns a retriever of a state.

        Raises:
            DataError: its file cannot be read.
        """
        async with self._opening:
            if self._retriever is None or state != self._state:
                buffer = await asyncio.to_thread(self._read, Path(state))
                self.close()
                self._state = state
                self._retriever = BufferRetriever(buffer, self._settings, is_tried=self._is_tried)
            return self._retriever

    def _read(self, path: Path) -> TraceBuffer:
        buffer = TraceBuffer(path, self._encoder, is_frozen=True)
        self._encoder = buffer.load_encoder()
        return buffer

    def close(self) -> None:
        """Closes the file."""
        if self._retriever is not None:
            self._retriever.close()
            self._retriever.buffer.close()
            self._retriever = None
