"""What a search looks at, in memory: one row per stored trace, in the order they were added,
evicted ones included."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from treegraft.tools.search.nearest import Mask


@dataclass(frozen=True, slots=True)
class Rows:
    """A state of the buffer that later additions and evictions leave as it is."""

    ids: npt.NDArray[np.int64]
    """[rows] in the file, ascending."""
    vectors: npt.NDArray[np.float32]
    """[rows, dim] of unit length."""
    live: Mask
    """[rows] not evicted."""
    terminal: Mask
    """[rows] holds the final answer."""
    tasks: npt.NDArray[np.int32]
    """[rows] number of the task."""
    sources: npt.NDArray[np.int32]
    """[rows] number of the source."""
    hashes: npt.NDArray[np.bytes_]
    """[rows] content hashes."""

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Added:
    """Rows to append, a column each, in the order of `Rows`."""

    ids: Sequence[int]
    vectors: npt.NDArray[np.float32]
    live: Sequence[bool]
    terminal: Sequence[bool]
    tasks: Sequence[str]
    sources: Sequence[str]
    hashes: Sequence[str]


class RowTable:
    """Grows `Rows`; one thread writes, others read `rows` at any time."""

    def __init__(self, dim: int) -> None:
        self._numbers: tuple[dict[str, int], dict[str, int]] = ({}, {})
        self._room = _room(0, dim)
        self.rows = self._room

    def append(self, added: Added) -> None:
        """Adds rows behind the present ones."""
        start, end = len(self.rows), len(self.rows) + len(added.ids)
        if end > len(self._room):
            grown = _room(max(end, 2 * len(self._room), 1024), self._room.vectors.shape[1])
            for name in Rows.__slots__:
                getattr(grown, name)[:start] = getattr(self.rows, name)
            self._room = grown
        room, here = self._room, slice(start, end)
        room.ids[here], room.vectors[here], room.terminal[here] = (
            added.ids,
            added.vectors,
            added.terminal,
        )
        room.tasks[here] = [_number(self._numbers[0], task) for task in added.tasks]
        room.sources[here] = [_number(self._numbers[1], source) for source in added.sources]
        room.hashes[here] = [content_hash.encode() for content_hash in added.hashes]
        live = np.concatenate([self.rows.live, np.asarray(added.live, bool)])
        self.rows = Rows(
            **{name: getattr(room, name)[:end] for name in Rows.__slots__ if name != "live"},
            live=live,
        )

    def evict(self, ids: Iterable[int]) -> None:
        """Marks rows as evicted."""
        live = self.rows.live.copy()
        live[np.isin(self.rows.ids, list(ids))] = False
        self.rows = Rows(
            **{name: getattr(self.rows, name) for name in Rows.__slots__ if name != "live"},
            live=live,
        )

    def of_task(self, rows: Rows, task: str) -> Mask:
        """Returns [rows] which are of this task."""
        found: Mask = rows.tasks == self._numbers[0].get(task, -1)
        return found

    def of_sources(self, rows: Rows, sources: Sequence[str]) -> Mask:
        """Returns [rows] which are of one of these sources."""
        found = np.zeros(len(rows), bool)
        for source in sources:
            found |= rows.sources == self._numbers[1].get(source, -1)
        return found


def _number(numbers: dict[str, int], name: str) -> int:
    return numbers.setdefault(name, len(numbers))


def _room(size: int, dim: int) -> Rows:
    return Rows(
        ids=np.zeros(size, np.int64),
        vectors=np.zeros((size, dim), np.float32),
        live=np.zeros(size, bool),
        terminal=np.zeros(size, bool),
        tasks=np.zeros(size, np.int32),
        sources=np.zeros(size, np.int32),
        hashes=np.zeros(size, "S32"),
    )
