"""The Step-Trace Buffer: steps of other agents, found by the history before them.

    with TraceBuffer("buffer.traces", encoder="minilm") as buffer:
        buffer.add(traces)
        [[(trace, similarity)]] = buffer.search(["r5 of r2 of e9 ?"])

Source: RAPO (arXiv 2603.03078, sec. 4.1). The file is SQLite (`store`), searches run in memory
(`rows`).
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
from treegraft.tools.search.nearest import search_exactly
from treegraft.traces.keys import check_trace
from treegraft.traces.rows import Excluded, RowTable
from treegraft.traces.store import COLUMNS, TraceFile, trace_row, undo

CHUNK = 256
"""Traces that are embedded and committed together."""
_PROBE = "r5 of r2 of e9 ?\nsearch e9 r2\nr2 of e9 is e41"
"""A text whose vector is stored, to recognise an encoder that changed under its name."""
_PREFIXED = ", ".join(f"t.{name}" for name in COLUMNS.split(", "))
_SAME = 0.999
"""Cosine from which two vectors of the probe count as the same encoder's, whatever the machine."""


@dataclass(frozen=True, slots=True)
class SourceStats:
    """SourceStats(num_traces=3, num_trajectories=1, mean_reward=1.0)"""

    num_traces: int
    num_trajectories: int
    mean_reward: float
    """Over its traces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferStats:
    """Counts of a buffer, evicted traces left out."""

    num_traces: int
    num_trajectories: int
    num_terminal: int
    """Traces that hold a final answer."""
    num_tasks: int
    steps_per_trajectory: float
    """Mean; a step that several trajectories share counts in each."""
    sources: dict[str, SourceStats]
    """By agent, in alphabetical order."""
    policy_versions: tuple[int, int] | None
    """Oldest and newest of the traces of the policy being trained; None where there are none."""
    num_evicted: int
    """Traces that were evicted; they stay in the file, so that `roll_back` can restore them."""
    encoder: str
    dim: int
    num_bytes: int
    """On disk."""


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
        # Two locks, so that a search need not wait for a chunk that is being committed.
        self._writing = threading.RLock()
        self._encoding = threading.Lock()
        name = encoder if isinstance(encoder, str) else None
        self._encoder: Encoder | None = None if isinstance(encoder, str) else encoder
        if name is not None and not self.path.exists():
            # Before the file is made, so that a misspelt encoder leaves none behind.
            self._encoder = build_encoder(name)
        self._is_checked = False
        self._file = TraceFile(self.path, create=encoder is not None, is_frozen=is_frozen)
        try:
            self.encoder_name, self.dim, self._probe = self._agree(name)
            self._table = RowTable(self.dim)
            self._catch_up(self._table)
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

    def _agree(self, name: str | None) -> tuple[str, int, npt.NDArray[np.float32]]:
        """Returns name, dimensions and probe of the file's encoder, which in a new file is ours;
        raises DataError where ours is another one.

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
            probe = _encode(ours, [_PROBE])[0].astype("<f4").tobytes()
            self._file.add_meta({"encoder": ours.name, "dim": ours.dim, "probe": probe})
            meta = self._file.meta()  # another process may have been first
        try:
            theirs = str(meta["encoder"])
            dim = int(meta["dim"])
            vector = np.frombuffer(meta["probe"], "<f4")
            if len(vector) != dim:
                raise ValueError(f"{dim} dimensions and a vector of {len(vector)} numbers")
        except (KeyError, TypeError, ValueError) as error:
            raise self._file.damage(f"its encoder is not readable: {error}") from error
        # By name alone; `load_encoder` compares vectors.
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
        return theirs, dim, vector

    def _catch_up(self, table: RowTable) -> None:
        """Appends the traces in the file beyond the table's last row: this process's
        additions, and those of others."""
        last = int(table.rows.ids[-1]) if len(table.rows) else -1
        columns = self._file.query(
            "SELECT id, evicted_at IS NULL, terminal, CASE task_id WHEN '' THEN asked_by(key) ELSE"
            " task_id END FROM traces WHERE id > ? ORDER BY id",
            (last,),
        )
        if columns:
            ids, live, terminal, tasks = zip(*columns, strict=True)
            vectors = self._file.vectors(last, ids[-1], len(ids), self.dim)
            table.append(ids, vectors, live, terminal, tasks)

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
            ids = self._file.live_ids(list(by_hash))
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
        self._catch_up(self._table)
        return len(new)

    def evict(self, capacity: int, *, source: str, update: int) -> int:
        """Keeps at most `capacity` traces of a source, and returns the number of evicted ones: the
        oldest policy's first, of these the least rewarded, of these the ones stored first. A step
        of several trajectories counts as the youngest and the best of them. Evicted traces stay in
        the file, marked, so that `roll_back` can restore them."""
        with self._writing:
            self._catch_up(self._table)
            rows = self._file.query(
                "SELECT t.id, max(m.policy_version) AS version, max(m.reward) AS best FROM traces t"
                " JOIN members m ON m.trace = t.id WHERE t.source = ? AND t.evicted_at IS NULL"
                " GROUP BY t.id ORDER BY version IS NOT NULL, version, best, t.id",
                (source,),
            )
            leaving = [row[0] for row in rows[: max(0, len(rows) - capacity)]]
            if leaving:
                marks = [(update, one) for one in leaving]
                with self._file.transaction() as connection:
                    connection.executemany("UPDATE traces SET evicted_at = ? WHERE id = ?", marks)
                self._table.evict(leaving)
        return len(leaving)

    def roll_back(self, update: int) -> None:
        """Undoes the additions and evictions of updates after this one."""
        # In one transaction: a kill leaves either state.
        with self._writing:
            with self._file.transaction() as connection:
                undo(connection, update)
            # Filled before it is put in place: a search meanwhile sees the old rows or the new.
            table = RowTable(self.dim)
            self._catch_up(table)
            self._table = table

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
        table = self._table
        rows = table.rows
        masks = table.eligible(rows, allow_terminal, tasks)
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
        table = self._table
        rows = table.rows
        masks = table.eligible(rows, allow_terminal, tasks)
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
            " m.source = ? AND m.task_id = ? AND m.trajectory = ? AND m.position > ? AND"
            " t.evicted_at IS NULL ORDER BY m.position, t.id",
            (trace.source, trace.task_id, trace.trajectory, trace.position),
        )
        steps = [trace]
        for position, group in groupby(rows, key=lambda row: int(row[0])):
            # A step of no text was left out, or is evicted: what follows does not fit.
            if position != trace.position + len(steps):
                break
            steps.append(self._file.to_trace(next(group)[1:]))
        return tuple(steps)

    def trajectories(
        self, task_id: str | None = None, *, with_evicted: bool = False
    ) -> Iterator[tuple[Trace, ...]]:
        """Gives each trajectory's steps in order, by source, task and name; a step that several
        share comes in each, with the reward and the policy's version of that one.

        Args:
            task_id: of one task alone; None for all.
            with_evicted: also those that were there once.
        """
        rows = self._file.query(
            "SELECT t.key, t.value, m.reward, m.source, m.task_id, m.position, t.terminal,"
            " m.trajectory, m.policy_version FROM members m JOIN traces t ON t.id = m.trace WHERE"
            " (? OR evicted_at IS NULL) AND ifnull(m.task_id = ?, 1) ORDER BY 4, 5, 8, 6, t.id",
            (with_evicted, task_id),
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
        return int(np.count_nonzero(self._table.rows.live))

    def __iter__(self) -> Iterator[Trace]:
        """Gives all traces in the order they were added."""
        last = -1
        # In pages, not with an open cursor: the buffer may be written to between two of them.
        while True:
            rows = self._file.query(
                f"SELECT id, {COLUMNS} FROM traces WHERE id > ? AND evicted_at IS NULL ORDER BY id"
                " LIMIT 1000",
                (last,),
            )
            yield from (self._file.to_trace(row[1:]) for row in rows)
            if not rows:
                return
            last = rows[-1][0]

    def stats(self) -> BufferStats:
        """Returns the counts of the buffer."""
        live = "FROM traces WHERE evicted_at IS NULL"
        terminal, tasks, oldest, newest = self._file.query(
            "SELECT total(terminal), count(DISTINCT task_id), min(policy_version),"
            f" max(policy_version) {live}"
        )[0]
        trajectories = self._file.query(
            "SELECT source, count(*), sum(num) FROM ("
            "SELECT m.source, count(*) AS num FROM members m JOIN traces t ON t.id = m.trace "
            "WHERE t.evicted_at IS NULL GROUP BY m.source, m.task_id, m.trajectory) GROUP BY source"
        )
        counts = {source: num for source, num, _ in trajectories}
        num_trajectories = sum(counts.values())
        sources = self._file.query(
            f"SELECT source, count(*), avg(reward) {live} GROUP BY source ORDER BY source"
        )
        files = [self.path, self.path.with_name(f"{self.path.name}-wal")]
        return BufferStats(
            num_traces=len(self),
            num_trajectories=num_trajectories,
            num_terminal=int(terminal),
            num_tasks=int(tasks),
            steps_per_trajectory=sum(num for _, _, num in trajectories) / max(1, num_trajectories),
            sources={name: SourceStats(k, counts.get(name, 0), mean) for name, k, mean in sources},
            policy_versions=None if newest is None else (oldest, newest),
            num_evicted=len(self._table.rows) - len(self),
            encoder=self.encoder_name,
            dim=self.dim,
            num_bytes=sum(path.stat().st_size for path in files if path.exists()),
        )

    def checksum(self, update: int | None = None) -> str:
        """Returns a checksum of all that a search depends on - traces in their order, vectors,
        trajectories, evictions, encoder -, as it was after an update; None: as it is."""
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
        """Returns the encoder, loaded by now. Raises DataError where it is not that of the file,
        and as `build_encoder` does."""
        with self._encoding:
            if self._encoder is None:
                self._encoder = build_encoder(self.encoder_name)
            encoder = self._encoder
            if not self._is_checked:
                # The name may mean other weights by now: a folder trained on, a hub id moved.
                fits = encoder.dim == self.dim
                cosine = float(_encode(encoder, [_PROBE])[0] @ self._probe) if fits else 0.0
                if cosine < _SAME:
                    raise DataError(
                        f"buffer '{self.path}': the encoder '{self.encoder_name}' gives other"
                        f" vectors than when the buffer was built ({encoder.dim} dimensions, cosine"
                        f" {cosine:.3f} for one text); use the model of then, or build it again",
                        code="encoder-changed",
                    )
                self._is_checked = True
            return encoder

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
