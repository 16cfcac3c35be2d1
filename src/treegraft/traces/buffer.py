"""The Step-Trace Buffer: steps of other agents, found by the history before them.

    with TraceBuffer("buffer.traces", encoder="minilm") as buffer:
        buffer.add(traces)
        [[(trace, similarity)]] = buffer.search(["r5 of r2 of e9 ?"])

Source: RAPO (arXiv 2603.03078, sec. 4.1). The file is SQLite (`store`), searches run in memory.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from glob import escape
from itertools import groupby
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from treegraft.core.errors import DataError, SettingError
from treegraft.core.keyed import keyed_int
from treegraft.core.types import Trace
from treegraft.tools.search.encoders import Encoder, build_encoder, encoder_name
from treegraft.tools.search.nearest import Mask, search_exactly
from treegraft.traces.keys import check_trace
from treegraft.traces.store import COLUMNS, TraceFile, trace_row, undo

CHUNK = 256
"""Traces that are embedded and committed together."""
_ALL = f"SELECT {COLUMNS} FROM traces ORDER BY id"
_PREFIXED = ", ".join(f"t.{name}" for name in COLUMNS.split(", "))


@dataclass(frozen=True, slots=True)
class SourceStats:
    """SourceStats(num_traces=3, num_trajectories=1, mean_reward=1.0)"""

    num_traces: int
    num_trajectories: int
    mean_reward: float
    """Over its traces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferStats:
    """Counts of a buffer."""

    num_traces: int
    num_trajectories: int
    num_terminal: int
    """Traces that hold a final answer."""
    num_tasks: int
    sources: dict[str, SourceStats]
    """By agent, in alphabetical order."""
    encoder: str
    dim: int
    num_bytes: int
    """On disk."""


Excluded = str | tuple[str, ...] | None
"""A task whose traces are not eligible, by its id or by several names; None or "": none."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The facts by which a search chooses: a snapshot, one row per trace in the order they were
    added, which later additions do not change."""

    ids: npt.NDArray[np.int64]
    """[rows] in the file, ascending."""
    vectors: npt.NDArray[np.float32]
    """[rows, dim] of unit length."""
    terminal: Mask
    """[rows] contains the final answer."""
    tasks: npt.NDArray[np.int32]
    """[rows] number of the task; of one without an id, of its question."""


def _no_rows(dim: int) -> Rows:
    return Rows(
        ids=np.zeros(0, np.int64),
        vectors=np.zeros((0, dim), np.float32),
        terminal=np.zeros(0, bool),
        tasks=np.zeros(0, np.int32),
    )


class TraceBuffer:
    """Traces on disk with their vectors in memory. One thread may write while others search."""

    def __init__(
        self,
        path: str | Path,
        encoder: str | Encoder | None = "minilm",
        *,
        is_frozen: bool = False,
    ) -> None:
        """Opens the buffer, or makes an empty one where there is no file.

        Args:
            path: its file; ":memory:" for a buffer of this process alone, gone once it is closed.
            encoder: a name for `build_encoder`, or an object; None means the one that the buffer
                was built with.
            is_frozen: it is only read, without a file of locks.

        Raises:
            DataError: the file is not a buffer, is damaged, was built with another encoder, or is
                missing with `encoder` None.
            SettingError, ModelError: there is no such encoder.
        """
        self.path = Path(path).expanduser()
        # Separate locks, so that a search need not wait for a chunk that is being committed.
        self._writing = threading.RLock()
        self._reading = threading.Lock()
        self._encoding = threading.Lock()
        name = encoder if isinstance(encoder, str) else None
        self._encoder: Encoder | None = None if isinstance(encoder, str) else encoder
        if name is not None and not self.path.exists():
            # Before the file is made, so that a misspelt encoder leaves none behind.
            self._encoder = build_encoder(name)
        self._file = TraceFile(self.path, create=encoder is not None, is_frozen=is_frozen)
        try:
            self.encoder_name, self.dim = self._agree(name)
            self._task_numbers: dict[str, int] = {}
            # Chunks that were added, and those of them that the rows have.
            self._num_chunks = 0
            self._num_caught_up = 0
            self._rows = self._caught_up(_no_rows(self.dim))
        except BaseException:
            self._file.close()
            raise

    @classmethod
    def open_as_built(cls, path: str | Path) -> Self:
        """Returns an existing buffer with the encoder that it was built with.

        Raises:
            DataError: there is no file, or it is not a buffer or damaged.
        """
        return cls(path, encoder=None)

    def _agree(self, name: str | None) -> tuple[str, int]:
        """Returns name and dimensions of the file's encoder, which in a new file is ours; raises
        DataError if ours is another one.

        Args:
            name: of our encoder, where that is not loaded yet.
        """
        meta = self._file.meta()
        if "encoder" not in meta:
            if self._encoder is None and name is None:
                raise DataError(
                    f"buffer '{self.path}' is empty and names no encoder; build it with: treegraft"
                    " buffer build RECIPE",
                    code="buffer-without-encoder",
                )
            ours = self._encoder = self._encoder or build_encoder(str(name))
            self._file.add_meta({"encoder": ours.name, "dim": ours.dim})
            meta = self._file.meta()  # another process may have been first
        try:
            theirs = str(meta["encoder"])
            dim = int(meta["dim"])
            # Before room is made for vectors of a length that a hostile file may name.
            lengths = self._file.query("SELECT length(vector) FROM vectors LIMIT 1")
            if lengths and lengths[0][0] != 4 * dim:
                raise ValueError(f"{dim} dimensions and a vector of {lengths[0][0]} bytes")
        except (KeyError, TypeError, ValueError) as error:
            raise self._file.damage(f"its encoder is not readable: {error}") from error
        # By name alone: a model of that name with other weights is not noticed.
        wanted = theirs if name is None else encoder_name(name)
        if self._encoder is not None:
            wanted = self._encoder.name
        if wanted != theirs:
            raise DataError(
                f"buffer '{self.path}' was built with the encoder '{theirs}' ({dim} dimensions),"
                f" but '{wanted}' is asked for; take \"{theirs}\" (the setting buffer.encoder), or"
                " build the buffer again",
                code="buffer-other-encoder",
            )
        return theirs, dim

    def _current(self) -> Rows:
        """Returns the rows with all additions so far. They are read when they are asked for: after
        each of many small additions, the copies would take time that grows with their square."""
        with self._reading:
            # Before reading: another thread may add a chunk meanwhile.
            num_chunks = self._num_chunks
            if num_chunks != self._num_caught_up:
                self._rows = self._caught_up(self._rows)
                self._num_caught_up = num_chunks
            return self._rows

    def _caught_up(self, rows: Rows) -> Rows:
        """Returns the rows with those after them for the traces in the file beyond the last one:
        this process's additions, and those of others."""
        last = int(rows.ids[-1]) if len(rows.ids) else -1
        columns = self._file.query(
            "SELECT id, terminal, CASE task_id WHEN '' THEN asked_by(key) ELSE task_id END"
            " FROM traces WHERE id > ? ORDER BY id",
            (last,),
        )
        if not columns:
            return rows
        ids, terminal, tasks = zip(*columns, strict=True)
        vectors = self._file.vectors(last, ids[-1], len(ids), self.dim)
        known = self._task_numbers
        numbers = [known.setdefault(one, len(known)) for one in tasks]
        # Always new arrays: readers search the old ones at the same time.
        return Rows(
            ids=np.concatenate([rows.ids, np.array(ids, np.int64)]),
            vectors=np.concatenate([rows.vectors, vectors]),
            terminal=np.concatenate([rows.terminal, np.array(terminal, bool)]),
            tasks=np.concatenate([rows.tasks, np.array(numbers, np.int32)]),
        )

    def _eligible(
        self, rows: Rows, allow_terminal: bool, exclude_tasks: Sequence[Excluded]
    ) -> list[Mask]:
        """Returns [rows] for each query: those that it may find, without the traces of its
        excluded task."""
        base = np.ones(len(rows.ids), bool) if allow_terminal else ~rows.terminal
        # One mask per task, not per query: the samples of a group ask about the same task.
        masks = dict[Excluded, Mask]()
        for task in set(exclude_tasks):
            names = task if isinstance(task, tuple) else (task or "",)
            numbers = [self._task_numbers.get(name, -1) for name in names if name]
            masks[task] = base & ~np.isin(rows.tasks, numbers) if numbers else base
        return [masks[task] for task in exclude_tasks]

    # ------------------------------------------------------------------ writing

    def add(self, traces: Iterable[Trace], *, update: int | None = None) -> int:
        """Stores traces, and returns the number of new ones; a trace whose content is in the buffer
        already is skipped.

        Chunks of `CHUNK` are embedded and committed one by one: a kill leaves whole chunks behind.
        Other processes may add to the same file; their traces are found from the next call on.

        Args:
            update: the training update that adds them, so that `roll_back` can undo it; None:
                before training.

        Raises:
            DataError: a trace without key or value, or with a reward that is not a number; then
                none is added.
        """
        listed = list(traces)
        for number, trace in enumerate(listed):
            check_trace(trace, number)
        num_new = 0
        with self._writing:
            # A kill loses one chunk, however many traces there are.
            for first in range(0, len(listed), CHUNK):
                num_new += self._add_chunk(listed[first : first + CHUNK], update)
        return num_new

    def _add_chunk(self, traces: Sequence[Trace], update: int | None) -> int:
        by_hash: dict[str, Trace] = {}
        for trace in traces:
            # The first of equal ones, as in separate chunks.
            by_hash.setdefault(trace.content_hash, trace)
        # The encoder's loading is not a part of the transaction, for which others wait.
        self.load_encoder()
        with self._file.transaction() as connection:
            ids = self._file.ids_of(list(by_hash))
            new = [name for name in by_hash if name not in ids]
            vectors = self._encode([by_hash[name].key for name in new])
            for name, vector in zip(new, vectors, strict=True):
                row = (name, *trace_row(by_hash[name]), update)
                cursor = connection.execute(
                    f"INSERT INTO traces (hash, {COLUMNS}, added_at) VALUES"
                    f" ({', '.join('?' * len(row))})",
                    row,
                )
                ids[name] = int(cursor.lastrowid or 0)
                blob = vector.astype("<f4").tobytes()
                connection.execute("INSERT INTO vectors VALUES (?, ?)", (ids[name], blob))
            # Of every trace, new or not: a known step may be one of a further trajectory.
            for trace in traces:
                step = (trace.source, trace.task_id, trace.trajectory, trace.position)
                facts = (ids[trace.content_hash], float(trace.reward), trace.policy_version, update)
                connection.execute(
                    "INSERT OR IGNORE INTO members VALUES (?, ?, ?, ?, ?, ?, ?, ?)", step + facts
                )
        self._num_chunks += 1
        return len(new)

    def roll_back(self, update: int) -> None:
        """Undoes the additions of updates after this one."""
        # In one transaction: a kill leaves either state.
        with self._writing:
            with self._file.transaction() as connection:
                undo(connection, update)
            with self._reading:
                self._rows = self._caught_up(_no_rows(self.dim))

    # ------------------------------------------------------------------ reading

    def search(
        self,
        keys: Sequence[str],
        k: int = 1,
        *,
        allow_terminal: bool = False,
        exclude_tasks: Sequence[Excluded] | None = None,
        min_similarity: float = -1.0,
    ) -> list[list[tuple[Trace, float]]]:
        """Returns for each key the k nearest traces with their cosines, best first, the one stored
        first where two are equal.

        Args:
            allow_terminal: whether traces that hold the final answer are eligible. Off by default:
                in a buffer built on the training tasks they give those tasks' answers away.
            exclude_tasks: for each key a task whose traces are not eligible, by its id or by its
                names (its id and `keys.asked_by`); None or "" excludes none.
            min_similarity: lowest cosine of a result, -1..1.
        """
        if isinstance(keys, str):
            raise SettingError("search(keys=): got one text, expected a list", code="keys-one-text")
        # Without traces the encoder need not be loaded.
        if not len(keys) or not len(self):
            return [[] for _ in keys]
        vectors = self._encode(keys)
        return self.search_vectors(vectors, k, allow_terminal, exclude_tasks, min_similarity)

    def search_vectors(
        self,
        vectors: npt.NDArray[np.float32],
        k: int = 1,
        allow_terminal: bool = False,
        exclude_tasks: Sequence[Excluded] | None = None,
        min_similarity: float = -1.0,
    ) -> list[list[tuple[Trace, float]]]:
        """Returns the same as `search` for vectors [keys, dim] of this buffer's encoder."""
        tasks = exclude_tasks or [None] * len(vectors)
        # Taken once: another thread may put other rows in their place.
        rows = self._current()
        masks = self._eligible(rows, allow_terminal, tasks)
        close: list[list[tuple[int, float]]] = []
        for places, similarities in search_exactly(rows.vectors, vectors, masks, k):
            is_close = similarities >= min_similarity
            ids = rows.ids[places[is_close]].tolist()
            close.append(list(zip(ids, similarities[is_close].tolist(), strict=True)))
        traces = self._file.traces(sorted({row for one in close for row, _ in one}))
        return [[(traces[row], similarity) for row, similarity in one] for one in close]

    def draw(
        self,
        seeds: Sequence[int],
        *,
        allow_terminal: bool = False,
        exclude_tasks: Sequence[Excluded] | None = None,
    ) -> list[Trace | None]:
        """Returns a random eligible trace for each seed, always the same for the same buffer; None
        where none is eligible.

        Source: RAPO (arXiv 2603.03078, sec. 5.5.2), the noise rate. The filters are those of
        `search`.
        """
        tasks = exclude_tasks or [None] * len(seeds)
        rows = self._current()
        masks = self._eligible(rows, allow_terminal, tasks)
        picks: list[int | None] = []
        for seed, mask in zip(seeds, masks, strict=True):
            ids = rows.ids[mask]
            picks.append(int(ids[keyed_int("draw", seed) % len(ids)]) if len(ids) else None)
        traces = self._file.traces(sorted({pick for pick in picks if pick is not None}))
        return [None if pick is None else traces[pick] for pick in picks]

    def rest(self, trace: Trace) -> tuple[Trace, ...]:
        """Returns the trace and what followed it in its trajectory, in order, up to the first step
        that is not in the buffer."""
        rows = self._file.query(
            f"SELECT m.position, {_PREFIXED} FROM members m JOIN traces t ON t.id = m.trace WHERE"
            " m.source = ? AND m.task_id = ? AND m.trajectory = ? AND m.position > ?"
            " ORDER BY m.position, t.id",
            (trace.source, trace.task_id, trace.trajectory, trace.position),
        )
        steps = [trace]
        for position, group in groupby(rows, key=lambda row: int(row[0])):
            # A step of no text was left out: what follows does not fit.
            if position != trace.position + len(steps):
                break
            steps.append(self._file.to_trace(next(group)[1:]))
        return tuple(steps)

    def trajectories(self, task_id: str | None = None) -> Iterator[tuple[Trace, ...]]:
        """Gives each trajectory's steps in order, by source, task and name; a step that several
        share comes in each, with the reward and the policy's version of that one.

        Args:
            task_id: of one task alone; None for all.
        """
        rows = self._file.query(
            "SELECT t.key, t.value, m.reward, m.source, m.task_id, m.position, t.terminal,"
            " m.trajectory, m.policy_version FROM members m JOIN traces t ON t.id = m.trace WHERE"
            " ifnull(m.task_id = ?, 1) ORDER BY 4, 5, 8, 6, t.id",
            (task_id,),
        )
        for _, group in groupby(rows, key=lambda row: (row[3], row[4], row[7])):
            yield tuple(map(self._file.to_trace, group))

    @property
    def num_changes(self) -> int:
        """Rows that were added or changed since the file was opened: equal numbers are one
        state."""
        return self._file.num_changes

    @property
    def num_keys_cut(self) -> int:
        """Keys given to `add` and `search` so far that were longer than the encoder reads, and lost
        their beginning."""
        return int(getattr(self._encoder, "num_cut", 0))

    def __len__(self) -> int:
        return len(self._current().ids)

    def __iter__(self) -> Iterator[Trace]:
        """Gives all traces in the order they were added."""
        # At once, not with an open cursor: the buffer may be written to between two traces.
        yield from map(self._file.to_trace, self._file.query(_ALL))

    def stats(self) -> BufferStats:
        """Returns the counts of the buffer."""
        terminal, tasks = self._file.query(
            "SELECT total(terminal), count(DISTINCT task_id) FROM traces"
        )[0]
        # Of the members: a step that several trajectories share counts in each.
        counts = self._file.query(
            "SELECT source, count(DISTINCT task_id || char(0) || trajectory) FROM members"
            " GROUP BY source"
        )
        num_trajectories = dict(counts)
        sources: dict[str, SourceStats] = {}
        for name, num, mean in self._file.query(
            "SELECT source, count(*), avg(reward) FROM traces GROUP BY source ORDER BY source"
        ):
            sources[name] = SourceStats(num, num_trajectories.get(name, 0), mean)
        files = [self.path, self.path.with_name(f"{self.path.name}-wal")]
        return BufferStats(
            num_traces=len(self),
            num_trajectories=sum(num_trajectories.values()),
            num_terminal=int(terminal),
            num_tasks=int(tasks),
            sources=sources,
            encoder=self.encoder_name,
            dim=self.dim,
            num_bytes=sum(path.stat().st_size for path in files if path.exists()),
        )

    def checksum(self, update: int | None = None) -> str:
        """Returns a checksum of all that a search depends on - traces in their order, vectors,
        trajectories, encoder -, as it was after an update; None: as it is."""
        last = (1 << 62) if update is None else update
        return self._file.checksum(f"{self.encoder_name} {self.dim}", last)

    # ------------------------------------------------------------------ files and threads

    def copy_to(self, path: str | Path, update: int | None = None) -> None:
        """Writes a copy, whole or not at all, over whatever is at `path`: as it was after `update`,
        None for all of it. The marks of updates stay behind: `roll_back` of the copy does not undo
        what another run has done."""
        target = Path(path).expanduser()
        target.parent.mkdir(parents=True, exist_ok=True)
        # In the same folder: a rename across file systems is a copy.
        partial = target.with_name(f".{target.name}.partial")
        try:
            for leftover in target.parent.glob(f"{escape(partial.name)}*"):
                leftover.unlink()
            self._file.back_up(partial, update)
            os.replace(partial, target)
        finally:
            # On a full disk their room is needed.
            for leftover in target.parent.glob(f"{escape(partial.name)}*"):
                leftover.unlink()

    def fold(self) -> None:
        """Makes the file whole without its log, so that it can be renamed. Raises
        DataError: that failed, as on a full disk."""
        self._file.fold()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ embedding

    def load_encoder(self) -> Encoder:
        """Returns the encoder, loaded by now. Raises DataError if it is not that of the file, and
        as `build_encoder` does."""
        with self._encoding:
            if self._encoder is None:
                self._encoder = build_encoder(self.encoder_name)
            if self._encoder.dim != self.dim:
                raise DataError(
                    f"buffer '{self.path}': the encoder '{self.encoder_name}' gives vectors of"
                    f" {self._encoder.dim} numbers, expected {self.dim} as when the buffer was"
                    " built; use the model of then, or build it again",
                    code="encoder-changed",
                )
            return self._encoder

    def _encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        encoder = self.load_encoder()
        # One call at a time: tokenizers keep the options of their last call.
        with self._encoding:
            return _encode(encoder, texts)


def _encode(encoder: Encoder, texts: Sequence[str]) -> npt.NDArray[np.float32]:
    """Returns [texts, dim]. Raises DataError for vectors of another shape or length."""
    shape = (len(texts), encoder.dim)
    vectors = np.ascontiguousarray(encoder.encode(texts) if texts else np.zeros(shape), np.float32)
    lengths = np.linalg.norm(vectors, axis=-1)
    if vectors.shape != shape or not np.allclose(lengths, 1.0, atol=1e-3):
        raise DataError(
            f"the encoder '{encoder.name}' gave an array of shape {vectors.shape} for {len(texts)}"
            f" texts; expected {shape}, every vector finite and of length 1",
            code="vectors-invalid",
        )
    return vectors
