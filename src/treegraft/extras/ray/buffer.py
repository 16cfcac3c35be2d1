"""The Step-Trace Buffer as a service: replicas that answer from one state of it, which every
request names.

Rank 0 alone writes the buffer. A state is a file that is written once, in a folder that all
machines share, and never changes: so any replica gives the same answer, also one that was started
a moment ago.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from treegraft.core.interfaces import NoiseKey, Retrieved
from treegraft.core.types import StepContent, Task, Trace
from treegraft.extras.ray.pool import Pool, Serving, answering
from treegraft.runs.tree_json import task_from_json, task_to_json
from treegraft.settings.config import Config
from treegraft.settings.explore import BufferSettings
from treegraft.settings.load import load_config
from treegraft.tools.search.encoders import Encoder
from treegraft.traces.buffer import TraceBuffer
from treegraft.traces.retrieve import BufferRetriever, Question, question_of
from treegraft.traces.store import TraceFile, trace_from_row, trace_row


def num_states(config: Config) -> int:
    """Returns how many states have files, and are held open by a replica: trees of so many updates
    may grow at once, and those of the next one begin."""
    return 2


class States:
    """The states of a run's buffer as files; rank 0 writes them."""

    def __init__(self, folder: Path, num: int = 2) -> None:
        """Args:
        folder: of the run, for these files alone. What an earlier process has left there goes.
        num: files that are kept, see `num_states`.
        """
        self._folder, self._num, self._paths = folder, num, list[Path]()
        self._lock = threading.Lock()
        for path in folder.glob("*.sqlite"):
            path.unlink()

    def take(self, buffer: TraceBuffer) -> str:
        """Returns the path of the buffer's present state, written where it is new; from any thread.

        Raises:
            DataError: the file cannot be written.
        """
        # Trees of several updates may begin at the same moment.
        with self._lock:
            path = (self._folder / f"{buffer.checksum()}.sqlite").absolute()
            if path not in self._paths:
                buffer.copy_to(path)
                self._paths.append(path)
                self._drop(len(self._paths) - self._num)
            return str(path)

    def close(self) -> None:
        """Removes the files."""
        self._drop(len(self._paths))

    def _drop(self, num: int) -> None:
        for _ in range(num):
            self._paths.pop(0).unlink(missing_ok=True)


class _Frozen(TraceBuffer):
    """A buffer that nobody writes to."""

    _opened = staticmethod(partial(TraceFile, is_frozen=True))


class BufferReplica(Serving):
    """Answers from the states of a buffer (an actor); questions of all growers share batches."""

    def __init__(self, role: str, number: int, place: str) -> None:
        """Opens nothing yet."""
        super().__init__(role, number, place)
        config = load_config(json.loads(self.place.config))
        self._settings, self._is_tried = config.buffer, bool(config.environment.kind)
        self._num_states = num_states(config)
        self._states: dict[str, tuple[TraceBuffer, BufferRetriever]] = {}
        self._encoder: Encoder | None = None
        self._opening = asyncio.Lock()

    @answering
    async def answer(self, state: str, question: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer to a question in a state, and what retrievals have cost since the last
        answer."""
        retriever = await self._at(state)
        found = await retriever.ask(Question(**question))
        answer = None if found is None else _to_rows(found)
        return {"found": answer, "counts": retriever.take_counts()}

    @answering
    async def trajectories(self, state: str, task: Any) -> list[Any]:
        """Returns the stored trajectories of a task in a state, as rows."""
        paths = await (await self._at(state)).trajectories(task_from_json(task))
        return [[trace_row(trace) for trace in path] for path in paths]

    async def _at(self, state: str) -> BufferRetriever:
        async with self._opening:
            if state not in self._states:
                buffer = await asyncio.to_thread(self._opened, Path(state))
                retriever = BufferRetriever(buffer, self._settings, is_tried=self._is_tried)
                self._states[state] = (buffer, retriever)
                for old in list(self._states)[: -self._num_states]:
                    closing, asking = self._states.pop(old)
                    asking.close()
                    closing.close()
            return self._states[state][1]

    def _opened(self, path: Path) -> TraceBuffer:
        buffer = _Frozen(path, self._encoder)
        self._encoder = buffer.load_encoder()
        return buffer


class ReplicaRetriever:
    """Finds traces by asking replicas (a `Retriever`), in one state of the buffer."""

    def __init__(self, pool: Pool, settings: BufferSettings, state: str) -> None:
        """Args: state: of `States.take`."""
        self._pool, self._settings, self._state = pool, settings, state
        self._counts: Counter[str] = Counter()

    async def retrieve(
        self, task: Task, contents: Sequence[StepContent], *, whole: bool, noise_key: NoiseKey
    ) -> Retrieved | None:
        """As `BufferRetriever.retrieve`.

        Raises:
            DeadlineExceeded: no replica has answered.
        """
        question = question_of(self._settings, task, contents, whole=whole, noise_key=noise_key)
        reply = await self._pool.ask("answer", self._state, asdict(question))
        found = None if reply["found"] is None else _from_rows(reply["found"])
        self._counts.update({"asked": 1, "nothing": found is None})
        self._counts.update(reply["counts"])
        return found

    async def trajectories(self, task: Task) -> Sequence[tuple[Trace, ...]]:
        """As `BufferRetriever.trajectories`.

        Raises:
            DeadlineExceeded: no replica has answered.
        """
        rows = await self._pool.ask("trajectories", self._state, task_to_json(task))
        return [tuple(map(trace_from_row, path)) for path in rows]

    def take_metrics(self) -> dict[str, float]:
        """Returns counts for `BufferRetriever.count` since the last call, not metrics: rank 0 adds
        those of all growers."""
        counts, self._counts = self._counts, Counter()
        return {name: float(count) for name, count in counts.items()}


def _to_rows(found: Retrieved) -> dict[str, Any]:
    return {
        "traces": [trace_row(trace) for trace in found.traces],
        "similarity": found.similarity,
        "others": [_to_rows(other) for other in found.others],
    }


def _from_rows(found: dict[str, Any]) -> Retrieved:
    return Retrieved(
        traces=tuple(map(trace_from_row, found["traces"])),
        similarity=found["similarity"],
        others=tuple(map(_from_rows, found["others"])),
    )
