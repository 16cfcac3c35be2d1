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
    """[rows] contains the final answer."""
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
        self.rows = Rows(
            ids=np.zeros(0, np.int64),
            vectors=np.zeros((0, dim), np.float32),
            terminal=np.zeros(0, bool),
            tasks=np.zeros(0, np.int32),
            live=np.zeros(0, bool),
        )

    def append(
        self,
        ids: Sequence[int],
        vectors: npt.NDArray[np.float32],
        live: Sequence[bool],
        terminal: Sequence[bool],
        tasks: Sequence[str],
    ) -> None:
        """Adds rows after the present ones, a column each."""
        # By question too: of traces without a task id.
        numbers = [self._task_numbers.setdefault(one, len(self._task_numbers)) for one in tasks]
        before = self.rows
        # Always new arrays: readers search the old ones at the same time.
        self.rows = Rows(
            ids=np.concatenate([before.ids, np.array(ids, np.int64)]),
            vectors=np.concatenate([before.vectors, vectors]),
            terminal=np.concatenate([before.terminal, np.array(terminal, bool)]),
            tasks=np.concatenate([before.tasks, np.array(numbers, np.int32)]),
            live=np.concatenate([before.live, np.array(live, bool)]),
        )

    def evict(self, ids: Iterable[int]) -> None:
        """Marks rows as evicted."""
        self.rows = replace(self.rows, live=self.rows.live & ~np.isin(self.rows.ids, list(ids)))

    def eligible(
        self, rows: Rows, allow_terminal: bool, exclude_tasks: Sequence[Excluded]
    ) -> list[Mask]:
        """Returns [rows] for each query: those that it may find, without the traces of its
        excluded task."""
        # Evicted rows stay in place, so that ids remain in order.
        base = rows.live if allow_terminal else rows.live & ~rows.terminal
        # One mask per task, not per query: the samples of a group ask about the same task.
        masks = dict[Excluded, Mask]()
        for task in set(exclude_tasks):
            names = task if isinstance(task, tuple) else (task or "",)
            numbers = [self._task_numbers.get(name, -1) for name in names if name]
            masks[task] = base & ~np.isin(rows.tasks, numbers) if numbers else base
        return [masks[task] for task in exclude_tasks]
