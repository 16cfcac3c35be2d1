"""The Step-Trace Buffer's file: SQLite, one transaction per chunk, so that a kill at any moment
loses at most the chunk in flight.

meta      format, encoder and dimensions
traces    one row per content (evicted_at is of versions before 0.8, and of no use)
members   the trajectories that a trace is a step of: equal steps of several trajectories are one
          trace, with the reward and the policy's version of each
vectors   float32, little-endian, beside their traces, so that nothing is ever embedded twice
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from treegraft.core.errors import DataError, nearest_file
from treegraft.core.steps import observation_from, text_of
from treegraft.core.types import StepContent, ToolCall, Trace
from treegraft.traces.keys import asked_by

FORMAT = 1
"""Of the file; raised when older code could not read it."""
APPLICATION_ID = 0x54475342
"""In SQLite's header: "TGSB", a Treegraft Step-Trace Buffer."""
BUSY_TIMEOUT_S = 30.0
"""Longest wait for another process that writes."""

SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE traces (
    id INTEGER PRIMARY KEY, hash TEXT NOT NULL, key TEXT NOT NULL, value TEXT NOT NULL,
    reward REAL NOT NULL, source TEXT NOT NULL, task_id TEXT NOT NULL, trajectory TEXT NOT NULL,
    position INTEGER NOT NULL, terminal INTEGER NOT NULL, policy_version INTEGER,
    added_at INTEGER, evicted_at INTEGER
);
CREATE UNIQUE INDEX live_hash ON traces (hash) WHERE evicted_at IS NULL;
CREATE INDEX by_source ON traces (source, evicted_at);
CREATE TABLE members (
    source TEXT NOT NULL, task_id TEXT NOT NULL, trajectory TEXT NOT NULL,
    position INTEGER NOT NULL, trace INTEGER NOT NULL, reward REAL NOT NULL,
    policy_version INTEGER, added_at INTEGER,
    PRIMARY KEY (source, task_id, trajectory, position, trace)
) WITHOUT ROWID;
CREATE INDEX by_trace ON members (trace);
CREATE TABLE vectors (id INTEGER PRIMARY KEY, vector BLOB NOT NULL);
"""
COLUMNS = "key, value, reward, source, task_id, position, terminal, trajectory, policy_version"
"""Of a trace, in the order of its fields."""
IN_MEMORY = Path(":memory:")
"""A path that to SQLite is no file: the buffer lives in this process, as long as it is open."""
Place = tuple[str, str, str]
"""Of a trajectory: its source, task and name."""


class TraceFile:
    """One open buffer file. Every method may be called from any thread."""

    def __init__(self, path: Path, *, create: bool, is_frozen: bool = False) -> None:
        """Args: is_frozen: nobody ever writes to the file, which is read without locks and without
        a file beside it, also on a network's disk; so is one that this user may not write.

        Raises DataError: no file and `create` is off, not a file of ours, of a newer format,
        damaged, or not to be opened."""
        self.path = path
        if (is_frozen or not create) and not path.exists():
            raise DataError(
                f"buffer '{path}': there is no such file.{nearest_file(path)} Build one with:"
                f" treegraft buffer build RECIPE {path}",
                code="buffer-missing",
            )
        if path.is_dir():
            raise DataError(
                f"buffer '{path}' is a folder; expected the file of a Step-Trace Buffer",
                code="buffer-is-folder",
            )
        # Of this process; SQLite itself locks against others.
        self._lock = threading.RLock()
        real = path.resolve()
        # Of a file that is there: another process may be making it at this moment.
        asked = (real, real.parent) if real.exists() else ()
        self._is_frozen = is_frozen or not all(os.access(one, os.W_OK) for one in asked)
        try:
            place: str | Path = path
            if self._is_frozen:
                # A log holds what another process, which may write, has not folded in yet.
                has_log = real.with_name(f"{real.name}-wal").exists()
                place = f"{real.as_uri()}?mode=ro{'' if has_log else '&immutable=1'}"
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(
                place,
                timeout=BUSY_TIMEOUT_S,
                isolation_level=None,
                check_same_thread=False,
                uri=self._is_frozen,
            )
        except (OSError, sqlite3.Error) as error:
            raise DataError(
                f"buffer '{path}' cannot be opened ({error}); expected a folder that can be"
                " written to",
                code="buffer-not-opened",
            ) from error
        try:
            with self._translated_errors():
                self._prepare(create)
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self, create: bool) -> None:
        # 64 MB: the default of 2 MB reads a large buffer's index again and again.
        self._connection.execute("PRAGMA cache_size = -65536")
        self._connection.create_function("asked_by", 1, _asked_by, deterministic=True)
        is_new = not self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if is_new and not create:
            raise DataError(
                f"buffer '{self.path}' is an empty file; build one with: treegraft buffer build"
                f" RECIPE {self.path}",
                code="buffer-file-empty",
            )
        if not is_new:
            refuse_foreign(self._connection, self.path)
        # SQLite itself does not wait here for others who switch to the log at the same moment.
        deadline = time.monotonic() + BUSY_TIMEOUT_S
        while not self._is_frozen:
            try:
                self._connection.execute("PRAGMA journal_mode = WAL")
                break
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        # A commit reaches the disk before it counts, so that not even a power cut loses it.
        self._connection.execute("PRAGMA synchronous = FULL")
        if is_new:
            with self.transaction() as connection:
                # Another process may have made them since we looked.
                if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                    # Not executescript, which would commit the transaction first.
                    for statement in filter(None, map(str.strip, SCHEMA.split(";"))):
                        connection.execute(statement)
                    connection.execute("INSERT INTO meta VALUES ('format', ?)", (FORMAT,))
        found = self.meta().get("format")
        # Never guessed at: a wrong reading would train on wrong steps.
        if found != FORMAT:
            raise DataError(
                f"buffer '{self.path}' has format {found}, this version of treegraft reads"
                f" {FORMAT}; build it again, or use the version that wrote it",
                code="buffer-version",
            )

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.ProgrammingError as error:
            raise DataError(f"buffer '{self.path}' is closed", code="buffer-closed") from error
        except sqlite3.OperationalError as error:
            doubt = "is the disk full, or does another process hold the file?"
            if self._is_frozen:
                doubt = "you may only read it here: name a copy in a folder that you may write to"
            text = f"buffer '{self.path}': {error}; {doubt}"
            raise DataError(text, code="buffer-busy") from error
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_NOTADB:
                raise DataError(
                    f"'{self.path}' is not a Step-Trace Buffer, which is an SQLite file; name"
                    " another path",
                    code="buffer-foreign",
                ) from error
            raise DataError(
                f"buffer '{self.path}' is damaged or not a Step-Trace Buffer ({error}); restore a"
                " copy, or build it again",
                code="buffer-damaged",
            ) from error

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Gives the connection inside a transaction that is committed at the end, or undone by an
        exception."""
        with self._lock, self._translated_errors():
            # Not at the first write: two that have read could then both not write.
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")

    @property
    def num_changes(self) -> int:
        """Rows that this process has written since it opened the file."""
        return self._connection.total_changes

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        """Returns all rows of a SELECT."""
        with self._lock, self._translated_errors():
            return self._connection.execute(sql, values).fetchall()

    def meta(self) -> dict[str, Any]:
        """Returns the whole table `meta`."""
        return dict(self.query("SELECT name, value FROM meta"))

    def add_meta(self, values: Mapping[str, Any]) -> None:
        """Writes entries of the table `meta`: all of them or, where one exists already, none."""
        with self.transaction() as connection:
            if not self.meta().keys() & values.keys():
                connection.executemany("INSERT INTO meta VALUES (?, ?)", list(values.items()))

    def ids_of(self, hashes: Sequence[str]) -> dict[str, int]:
        """Returns the ids of the content hashes that are in the file."""
        marks = ",".join("?" * len(hashes))
        return dict(self.query(f"SELECT hash, id FROM traces WHERE hash IN ({marks})", hashes))

    def traces(self, ids: Sequence[int]) -> dict[int, Trace]:
        """Returns the traces of these rows."""
        # Few of them: SQLite limits the marks of a statement to 32,766.
        marks = ",".join("?" * len(ids))
        rows = self.query(f"SELECT id, {COLUMNS} FROM traces WHERE id IN ({marks})", ids)
        return {row[0]: self.to_trace(row[1:]) for row in rows}

    def to_trace(self, row: Sequence[Any]) -> Trace:
        """Returns the trace of a row of `COLUMNS`. Raises DataError for one that does not parse."""
        try:
            return trace_from_row(row)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise self.damage(f"a stored trace does not parse: {error}") from error

    def vectors(self, after: int, last: int, num: int, dim: int) -> npt.NDArray[np.float32]:
        """Returns [traces, dim] of the rows after one, up to another, in their order. Raises
        DataError unless there are `num`."""
        # Filled in parts: all blobs and their joint copy beside it would take three times the room.
        vectors = np.empty((num, dim), np.float32)
        filled = 0
        with self._lock, self._translated_errors():
            selected = "SELECT vector FROM vectors WHERE id > ? AND id <= ?"
            selected += " AND typeof(vector) = 'blob' ORDER BY id"
            cursor = self._connection.execute(selected, (after, last))
            while blobs := cursor.fetchmany(4096):
                joined = b"".join(blob for (blob,) in blobs)
                if filled + len(blobs) > num or len(joined) != len(blobs) * dim * 4:
                    raise self.damage(f"vectors that do not fit {num} traces of {dim} numbers")
                part = np.frombuffer(joined, "<f4").reshape(-1, dim)
                vectors[filled : filled + len(blobs)] = part
                filled += len(blobs)
        if filled != num:
            raise self.damage(f"{num} traces and {filled} vectors")
        return vectors

    def damage(self, reason: str) -> DataError:
        """Returns the error of a damaged file."""
        return DataError(
            f"buffer '{self.path}' is damaged ({reason}); restore a copy, or build it again",
            code="buffer-damaged",
        )

    def back_up(self, path: Path, update: int | None = None) -> None:
        """Copies the file as it was after `update` (None: as it is), without the marks of updates,
        also while others read and write it; the copy is whole in one file. Raises DataError: it is
        not, as on a full disk."""
        with self._lock, self._translated_errors(), closing(sqlite3.connect(path)) as copy:
            self._connection.backup(copy)
            with copy:
                if update is not None:
                    undo(copy, update)
                # Another run counts its updates from 1 again.
                copy.execute("UPDATE traces SET added_at = NULL")
                copy.execute("UPDATE members SET added_at = NULL")
            _fold(copy)

    def checksum(self, head: str, update: int) -> str:
        """Returns a checksum of `head` and of all that there was after an update: traces in their
        order, vectors, trajectories."""
        traces = hashlib.blake2b(digest_size=16)
        whole = hashlib.blake2b(digest_size=16)
        with self._lock, self._translated_errors():
            for *row, vector in self._connection.execute(
                f"SELECT t.id, hash, {COLUMNS}, added_at, vector FROM traces t"
                " LEFT JOIN vectors v ON v.id = t.id"
                " WHERE added_at IS NULL OR added_at <= ? ORDER BY t.id",
                (update,),
            ):
                traces.update(repr(tuple(row)).encode("utf-8", "surrogatepass"))
                traces.update(vector or b"")
            whole.update(traces.digest() + head.encode())
            for row in self._connection.execute(
                "SELECT * FROM members WHERE added_at IS NULL OR added_at <= ? ORDER BY source,"
                " task_id, trajectory, position, trace",
                (update,),
            ):
                whole.update(repr(row).encode("utf-8", "surrogatepass"))
        return whole.hexdigest()

    def fold(self) -> None:
        """Folds the write-ahead log into the file, which can then be renamed. Raises DataError:
        that failed, as on a full disk."""
        with self._lock, self._translated_errors():
            _fold(self._connection)

    def close(self) -> None:
        """Folds the write-ahead log into the file and closes it. A second call does nothing."""
        with self._lock:
            # Closed before, or damaged: then the log stays beside the file and is read at the next
            # opening.
            with suppress(sqlite3.Error):
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._connection.close()


def _asked_by(key: Any) -> str:
    """The name of a task by a stored key; one that does not parse is told when it is read."""
    with suppress(ValueError, TypeError, AttributeError, RecursionError):
        return asked_by(json.loads(key))
    return ""


def _fold(connection: sqlite3.Connection) -> None:
    # A copy has the log of its source. Closing would leave it beside the file, under the old name,
    # where the disk is full, and say nothing.
    (mode,) = connection.execute("PRAGMA journal_mode = DELETE").fetchone()
    if mode != "delete":
        raise sqlite3.OperationalError("its write-ahead log could not be folded into it")


def undo(connection: sqlite3.Connection, update: int) -> None:
    """Undoes the additions of updates after this one."""
    later = "(SELECT id FROM traces WHERE added_at > ?)"
    for statement in (
        f"DELETE FROM vectors WHERE id IN {later}",
        "DELETE FROM members WHERE added_at > ?",
        "DELETE FROM traces WHERE added_at > ?",
    ):
        connection.execute(statement, (update,))


def refuse_foreign(connection: sqlite3.Connection, path: Path) -> None:
    """Raises DataError for a database that is not a Step-Trace Buffer, also for one with views,
    triggers, virtual tables or computed columns, which run when they are read or written and which
    no buffer has."""
    # What the file itself defines may not call functions with effects.
    connection.execute("PRAGMA trusted_schema = OFF")
    (application_id,) = connection.execute("PRAGMA application_id").fetchone()
    if application_id != APPLICATION_ID:
        raise DataError(
            f"'{path}' is an SQLite file of another program, not a Step-Trace Buffer; name another"
            " path",
            code="buffer-foreign",
        )
    for kind, name, sql in connection.execute("SELECT type, name, sql FROM sqlite_master"):
        # No table of ours has these words, which virtual tables and computed columns cannot do
        # without.
        if kind not in ("table", "index") or re.search(r"\b(virtual|as)\b", str(sql), re.I):
            raise DataError(
                f"buffer '{path}' holds the {kind} '{name:.80}', which no Step-Trace Buffer has; do"
                " not use this file",
                code="buffer-schema-foreign",
            )


def to_json(value: object) -> str:
    """Returns readable JSON; escaped only where text holds lone surrogates, which exist in no
    encoding."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return json.dumps(value, separators=(",", ":")) if re.search("[\ud800-\udfff]", text) else text


def trace_row(trace: Trace) -> tuple[Any, ...]:
    """Returns the values of `COLUMNS`."""
    value = trace.value if isinstance(trace.value, str) else asdict(trace.value)
    if isinstance(value, dict) and trace.question:
        value["question"] = trace.question
    texts = (to_json(trace.key), to_json(value))
    place = (trace.source, trace.task_id, trace.position, int(trace.terminal), trace.trajectory)
    return (*texts, float(trace.reward), *place, trace.policy_version)


def trace_from_row(row: Sequence[Any]) -> Trace:
    """Returns the trace whose `trace_row` this is. Raises ValueError, TypeError, KeyError: it is
    something else."""
    key, value, reward, source, task_id, position, terminal, trajectory, version = row
    found = json.loads(value)
    text = json.loads(key)
    place = (source, task_id, position)
    about = (float(reward), *place, bool(terminal), trajectory, version)
    question = text_of(found.get("question", ""), "question") if isinstance(found, dict) else ""
    return Trace(text, content_from_json(found), *about, question)


def content_from_json(value: Any) -> str | StepContent:
    """Returns the value of a trace from the JSON that is stored for it. Raises KeyError, TypeError:
    it is something else."""
    if isinstance(value, str):
        return value
    return StepContent(
        thought=value["thought"],
        calls=tuple(ToolCall(**call) for call in value["calls"]),
        observations=tuple(map(observation_from, value["observations"])),
        answer=value["answer"],
    )
