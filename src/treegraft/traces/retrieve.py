"""Retrieval during a rollout: the questions of all waiting trajectories are answered together, away
from the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from treegraft.core.interfaces import NoiseKey, Retrieved
from treegraft.core.keyed import keyed_int, keyed_unit
from treegraft.core.threads import release_threads
from treegraft.core.types import StepContent, Task, Trace
from treegraft.settings.explore import BufferSettings
from treegraft.traces.batches import Batcher
from treegraft.traces.buffer import Excluded, TraceBuffer
from treegraft.traces.keys import asked_by, retrieval_key

NUM_TRIES = 4
"""Nearest steps that an environment tries; each costs a copy of it, and the first that comes true
is attached."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a trajectory wants to have of the buffer."""

    key: str
    task_id: str
    whole: bool
    draw: int | None
    """Seed of a random draw; None for the nearest trace."""


class BufferRetriever:
    """Finds traces in a Step-Trace Buffer, top 1, under the filters of a recipe; the next nearest
    only for environments, which try them.

    Source: RAPO (arXiv 2603.03078, sec. 4.1): dense retrieval of the step whose key is most similar
    to the history; sec. 5.5.2 for the noise rate. The paper does not say whether steps with an
    answer may be retrieved; by default none is.
    """

    def __init__(
        self, buffer: TraceBuffer, settings: BufferSettings, *, is_tried: bool = False
    ) -> None:
        """Args: buffer: stays the caller's to close, after this. is_tried: steps are tried in an
        environment.
        """
        self.buffer = buffer
        self._settings = settings
        self._is_tried = is_tried
        # The paper's top 1, except where the first may prove untrue.
        self._num_nearest = NUM_TRIES if is_tried else 1
        self._batcher = Batcher(self._answer, "retrieval")
        # With overlap the thread of retrievals counts while an update's counts are taken.
        self._counts: Counter[str] = Counter()
        self._counting = threading.Lock()

    async def retrieve(
        self, task: Task, contents: Sequence[StepContent], *, whole: bool, noise_key: NoiseKey
    ) -> Retrieved | None:
        """Returns the nearest eligible trace, or a random one as often as the recipe says; None
        where none is eligible."""
        is_random = keyed_unit(*noise_key, "noise rate") < self._settings.random_prob
        draw = keyed_int(*noise_key, "random trace") if is_random else None
        key = retrieval_key(task.question, contents)
        found = await self._batcher.ask(Question(key, task.id, whole, draw))
        self.count({"asked": 1, "nothing": found is None})
        return found

    def count(self, counts: Mapping[str, float]) -> None:
        """Adds what retrievals have cost, here or in another process: "asked", "nothing", "cut" and
        "busy_s"."""
        with self._counting:
            self._counts.update(counts)

    def take_counts(self) -> dict[str, float]:
        """Returns what `count` has added since the last call."""
        with self._counting:
            counts: dict[str, float] = dict(self._counts)
            self._counts.clear()
        return counts

    async def trajectories(self, task: Task) -> Sequence[tuple[Trace, ...]]:
        """Returns the task's own stored trajectories without gaps: the best rewarded first, of
        these those with the fewest steps."""
        # What may not be retrieved may not be begun below either.
        if not self._settings.allow_same_task:
            return []
        return await asyncio.to_thread(self._trajectories, task)

    def _trajectories(self, task: Task) -> list[tuple[Trace, ...]]:
        first_key = retrieval_key(task.question, ())
        whole: list[tuple[Trace, ...]] = []
        for path in self.buffer.trajectories(task.id):
            has_all = [trace.position for trace in path] == list(range(len(path)))
            # Under another seed the same id may stand for another question; environments show it.
            if has_all and (path[0].key == first_key or self._is_tried):
                whole.append(path)
        return sorted(
            whole,
            key=lambda path: (-path[-1].reward, len(path), [trace.content_hash for trace in path]),
        )

    def _answer(self, batch: Sequence[Question]) -> list[Retrieved | None]:
        """Returns the answers to a batch; runs in the thread of retrievals."""
        settings = self._settings
        buffer = self.buffer
        began = time.monotonic()
        num_cut_before = buffer.num_keys_cut
        # By identity: two samples of a group may ask the same.
        sought: list[Question] = []
        drawn: list[Question] = []
        for question in batch:
            (sought if question.draw is None else drawn).append(question)
        found: dict[int, Retrieved] = {}

        def excluded(questions: Sequence[Question]) -> list[Excluded]:
            named = [(one.task_id, asked_by(one.key)) for one in questions]
            return [None] * len(named) if settings.allow_same_task else [*named]

        try:
            hits = buffer.search(
                [question.key for question in sought],
                self._num_nearest,
                allow_terminal=settings.terminal != "exclude",
                exclude_tasks=excluded(sought),
                min_similarity=settings.min_similarity,
            )
            for question, nearest in zip(sought, hits, strict=True):
                # A nearest step with an answer is not passed over: the next best belongs to another
                # situation, so nothing is retrieved.
                if nearest and (settings.terminal == "allow" or not nearest[0][0].terminal):
                    first, *others = (
                        self._retrieved(question, trace, similarity)
                        for trace, similarity in nearest
                        if settings.terminal == "allow" or not trace.terminal
                    )
                    found[id(question)] = replace(first, others=tuple(others))
            traces = buffer.draw(
                [question.draw or 0 for question in drawn],
                allow_terminal=settings.terminal == "allow",
                exclude_tasks=excluded(drawn),
            )
            for question, trace in zip(drawn, traces, strict=True):
                if trace is not None:
                    found[id(question)] = self._retrieved(question, trace, 0.0)
        finally:
            # Idle threads of this one's team would slow the engine's down.
            release_threads()
        num_cut = buffer.num_keys_cut - num_cut_before
        self.count({"cut": num_cut, "busy_s": time.monotonic() - began})
        return [found.get(id(question)) for question in batch]

    def _retrieved(self, question: Question, trace: Trace, similarity: float) -> Retrieved:
        rest = self.buffer.rest(trace) if question.whole else ()
        kept = tuple(one for one in rest if self._settings.terminal == "allow" or not one.terminal)
        is_same = asked_by(trace.key) == asked_by(question.key)
        return Retrieved(
            traces=kept or (trace,),
            similarity=similarity,
            task_id=trace.task_id or (question.task_id if is_same else ""),
        )

    def take_metrics(self) -> dict[str, float]:
        """Returns the metrics since the last call."""
        counts = Counter(self.take_counts())
        return {
            "retrieve/num_asked": float(counts["asked"]),
            "retrieve/nothing_frac": counts["nothing"] / max(1, counts["asked"]),
            "retrieve/num_keys_cut": float(counts["cut"]),
            "time/retrieve_s": float(counts["busy_s"]),
        }

    def close(self) -> None:
        """Ends the thread."""
        self._batcher.close()
