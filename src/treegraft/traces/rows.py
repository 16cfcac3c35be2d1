"""The facts by which a search chooses, in memory: one row per stored trace, in the order they were
added, evicted ones included."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from treegraft.tools.search.nearest import Mask

Excluded = str | tuple[str, ...] | None
"""A task whose traces are not eligible, by its id or by several names; None or "": none."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A snapshot of the buffer; later additions and evictions do not change it."""

    ids: npt.NDArray[np.int64]
    """[rows] in the file, ascending."""
    vectors: npt.NDArray[np.float32]
    """[rows, dim] of unit length."""
    terminal: Mask
    """[rows] holds the final answer."""
    tasks: npt.NDArray[np.int32]
    """[rows] number of the task; of one without an id, of its question."""
    live: Mask
    """[rows] not evicted."""

    def __len__(self) -> int:
        return len(self.ids)


class RowTable:
    """Grows `Rows`; one thread writes, others read and search at any time."""

    def __init__(self, dim: int) -> None:
        """Args: dim: length of the vectors."""
        self._task_numbers: dict[str, int] = {}
        self.rows = self._reserved = _zeros(0, dim)

    def append(
        self,
        ids: Sequence[int],
        vectors: npt.NDArray[np.float32],
        live: Sequence[bool],
        terminal: Sequence[bool],
        tasks: Sequence[str],
    ) -> None:
        """Adds rows after the present ones, a column each."""
        start = len(self.rows)
        end = len(self.rows) + len(ids)
        # Doubled, so that a buffer that grows by chunks is not copied for each of them. Readers
        # hold views of the old rows, which are never written to again.
        if end > len(self._reserved):
            grown = _zeros(max(end, 2 * len(self._reserved), 1024), vectors.shape[1])
            for name in Rows.__slots__:
                getattr(grown, name)[:start] = getattr(self.rows, name)
            self._reserved = grown
        columns = {
            "ids": ids,
            "vectors": vectors,
            "terminal": terminal,
            "tasks": [
                self._task_numbers.setdefault(task, len(self._task_numbers)) for task in tasks
            ],
        }
        for name, values in columns.items():
            getattr(self._reserved, name)[start:end] = values
        present = {name: getattr(self._reserved, name)[:end] for name in columns}
        # `live` alone changes later, by eviction, so every state has its own.
        self.rows = Rows(**present, live=np.concatenate([self.rows.live, np.asarray(live, bool)]))

    def evict(self, ids: Iterable[int]) -> None:
        """Marks rows as evicted."""
        self.rows = replace(self.rows, live=self.rows.live & ~np.isin(self.rows.ids, list(ids)))

    def eligible(
        self, rows: Rows, allow_terminal: bool, exclude_tasks: Sequence[Excluded]
    ) -> list[Mask]:
        """Returns [rows] for each query: those that it may find, without the traces of its
        excluded task."""
        base = rows.live if allow_terminal else rows.live & ~rows.terminal
        # One mask per task, not per query: the samples of a group ask about the same task.
        masks = dict[Excluded, Mask]()
        for task in set(exclude_tasks):
            names = task if isinstance(task, tuple) else (task or "",)
            numbers = [self._task_numbers.get(name, -1) for name in names if name]
            masks[task] = base & ~np.isin(rows.tasks, numbers) if numbers else base
        return [masks[task] for task in exclude_tasks]


def _zeros(size: int, dim: int) -> Rows:
    return Rows(
        ids=np.zeros(size, np.int64),
        vectors=np.zeros((size, dim), np.float32),
        terminal=np.zeros(size, bool),
        tasks=np.zeros(size, np.int32),
        live=np.zeros(size, bool),
    )
