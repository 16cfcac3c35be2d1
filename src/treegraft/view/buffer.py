"""The Step-Trace Buffer of a run; its file is opened for reading only."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from heapq import nlargest
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from treegraft.core.errors import DataError, SettingError
from treegraft.core.files import parse_json, read_inside
from treegraft.runs.trust import is_trusted
from treegraft.tools.search.encoders import BUILT_IN, Encoder, build_encoder, encoder_name
from treegraft.traces.store import COLUMNS, content_from_json, pruning_rows, refuse_foreign

PAGE = 50
"""Traces of one answer."""
_ORDERS = {
    "stored": "id",
    "reward": "reward DESC, id",
    "task": "task_id, position, id",
    "source": "source, task_id, position, id",
    "longest": "length(value) DESC, id",
}
_CHUNK = 4096
_MAX_SOURCES = 1000
_MAX_STEPS = 10_000
"""Of a trajectory."""
_MAX_BYTES = 16 << 20
"""Of one text, and of the texts of one answer."""
DEADLINE_S = 5.0
"""For the questions of one answer to the file."""


class BufferView:
    """The buffer of a run, where it lies in the run's folder or its path was given."""

    def __init__(self, run_dir: Path, named: Path | None = None) -> None:
        """Args:
        named: a buffer outside the run folder to show; None for the run's own.
        """
        self._run_dir, self._named = run_dir, named
        self._lock = threading.Lock()
        self._encoder: Encoder | None = None

    def note(self) -> dict[str, Any]:
        """Returns the content of buffer.json; empty where the run had no buffer."""
        found, path = None, self._run_dir / "buffer.json"
        with suppress(OSError, ValueError):
            found = parse_json(read_inside(path, self._run_dir))
        return found if isinstance(found, dict) else {}

    def path(self) -> Path | None:
        """Returns the buffer's file; None where there is none or it is outside the run folder."""
        if self._named is not None:
            return self._named
        # A run folder may come from elsewhere: its buffer.json must not open other files.
        inside = self._run_dir.resolve()
        named = self.note().get("path", "buffer/traces.sqlite")
        path = Path(os.path.realpath(inside / str(named)[:1000]))
        return path if path.is_relative_to(inside) and path.is_file() else None

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        path = self.path()
        if path is None:
            raise DataError(
                f"this run has no Step-Trace Buffer in its folder{self._elsewhere()}",
                code="run-without-buffer",
            )
        # A write-ahead log means that a run is at work; without one the file is whole, and may lie
        # on a read-only disk.
        log = path.with_name(f"{path.name}-wal")
        has_log = log.is_file() and not log.is_symlink()
        address = f"file:{quote(str(path))}?mode=ro{'' if has_log else '&immutable=1'}"
        try:
            with closing(sqlite3.connect(address, uri=True, timeout=5.0)) as connection:
                connection.row_factory = sqlite3.Row
                end = time.monotonic() + DEADLINE_S
                connection.set_progress_handler(lambda: time.monotonic() > end, 10_000)
                connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_BYTES)
                refuse_foreign(connection, path)
                yield connection
        except sqlite3.Error as error:
            raise DataError(
                f"the buffer '{path.name}' cannot be read ({error})", code="buffer-unreadable"
            ) from error

    def _elsewhere(self) -> str:
        if not (named := self.note().get("path")):
            return ""
        return (
            f"; it used '{named}', which lies outside. To see it: treegraft view RUN --buffer FILE"
        )

    def stats(self) -> dict[str, Any]:
        """Returns counts, sources with their mean rewards, and the encoder; without a buffer
        `is_there` is False and `why` holds the reason."""
        if self.path() is None:
            return {
                "is_there": False,
                "why": f"This run has no Step-Trace Buffer in its folder{self._elsewhere()}.",
                "note": self.note(),
            }
        with self._open() as connection:
            total, terminal, tasks, evicted = connection.execute(
                "SELECT count(*) FILTER (WHERE evicted_at IS NULL),"
                " count(*) FILTER (WHERE evicted_at IS NULL AND terminal),"
                " count(DISTINCT CASE WHEN evicted_at IS NULL THEN task_id END),"
                " count(evicted_at) FROM traces"
            ).fetchone()
            sources = connection.execute(
                "SELECT source, count(*) AS num, avg(reward) AS reward FROM traces WHERE evicted_at"
                f" IS NULL GROUP BY source ORDER BY source LIMIT {_MAX_SOURCES}"
            ).fetchall()
            (encoder,) = connection.execute(
                "SELECT value FROM meta WHERE name = 'encoder'"
            ).fetchone() or ("",)
        return {
            "is_there": True,
            "num_traces": total,
            "num_terminal": terminal,
            "num_tasks": tasks,
            "num_evicted": evicted,
            "sources": [dict(row) for row in sources],
            "encoder": encoder,
            "note": self.note(),
        }

    def browse(
        self,
        *,
        text: str = "",
        source: str = "",
        task: str = "",
        order: str = "stored",
        offset: int = 0,
    ) -> dict[str, Any]:
        """Returns a page of traces from `offset` on with `text` in key or value; `source`, `task`
        narrow them."""
        where, values = ["evicted_at IS NULL"], list[Any]()
        if text:
            # Stored as JSON, so that a quote or a line break inside is escaped.
            pattern = re.sub("[!%_]", r"!\g<0>", json.dumps(text, ensure_ascii=False)[1:-1])
            where.append("(key LIKE ? ESCAPE '!' OR value LIKE ? ESCAPE '!')")
            values += [f"%{pattern}%"] * 2
        for name, value in (("source", source), ("task_id", task)):
            if value:
                where.append(f"{name} = ?")
                values.append(value)
        condition = " AND ".join(where)
        with self._open() as connection:
            (total,) = connection.execute(
                f"SELECT count(*) FROM traces WHERE {condition}", values
            ).fetchone()
            rows = connection.execute(
                f"SELECT hash, {COLUMNS} FROM traces WHERE {condition} ORDER BY"
                f" {_ORDERS.get(order, 'id')} LIMIT ? OFFSET ?",
                [*values, PAGE, offset],
            )
            return {"total": total, "offset": offset, "rows": _all_shown(rows)}

    def nearest(
        self, key: str, *, source: str = "", allow_terminal: bool = True, k: int = 20
    ) -> dict[str, Any]:
        """Returns the `k` traces whose keys are most similar to a history, with their cosines, best
        first: those that a retrieval would find.

        Raises:
            DataError: there is no buffer, or its encoder is none that this viewer may load.
            ModelError: its encoder cannot be loaded here.
        """
        with self._open() as connection:
            (name,) = connection.execute("SELECT value FROM meta WHERE name = 'encoder'").fetchone()
            with self._lock:
                if self._encoder is None or self._encoder.name != name:
                    self._encoder = self._load(str(name))
                wanted = self._encoder.encode([key])[0]
            cursor = connection.execute(
                "SELECT v.id, v.vector FROM vectors v JOIN traces t ON t.id = v.id"
                " WHERE t.evicted_at IS NULL AND ? IN ('', t.source) AND (? OR NOT t.terminal)"
                " AND length(v.vector) = ?",
                [source, allow_terminal, 4 * len(wanted)],
            )
            best: list[tuple[float, int]] = []
            # All vectors of a large buffer at once would not fit into the viewer's memory.
            while rows := cursor.fetchmany(_CHUNK):
                vectors = np.frombuffer(b"".join(row[1] for row in rows), "<f4")
                cosines = vectors.reshape(len(rows), -1) @ wanted
                # Of equal cosines the older trace comes first, as in a retrieval.
                new = ((float(s), -int(row[0])) for s, row in zip(cosines, rows, strict=True))
                best = nlargest(k, [*best, *new])
            found = []
            for similarity, negative in best:
                row = connection.execute(
                    f"SELECT hash, {COLUMNS} FROM traces WHERE id = ?", [-negative]
                ).fetchone()
                found.append(_shown(row) | {"similarity": similarity})
        return {"total": len(found), "offset": 0, "rows": found}

    def _load(self, name: str) -> Encoder:
        # The name stands in a file that may come from elsewhere, and a folder of a model may hold
        # code. The settings of a run that this user made or trusts are the user's own word.
        own = ""
        with suppress(OSError, ValueError, KeyError, TypeError, SettingError):
            if is_trusted(self._run_dir / "config.json"):
                found = parse_json(read_inside(self._run_dir / "config.json", self._run_dir))
                own = encoder_name(found["buffer"]["encoder"])
        if name not in (*BUILT_IN, own):
            raise DataError(
                f"this buffer names the encoder '{name:.200}', and the run is not one of yours that"
                " was trained with it; such an encoder may hold code. Search for words instead, or"
                " trust the run first: treegraft.trust(RUN) in Python",
                code="buffer-encoder-unnamed",
            )
        return build_encoder(name)

    def asked(self, question: str, hashes: Iterable[str]) -> dict[str, bool]:
        """Returns whether each of these traces was written on this question, for those that the
        buffer holds; empty without a buffer."""
        if self.path() is None:
            return {}
        # A key is lines with single spaces, the first of them the question.
        first_line = " ".join(question.split())
        with self._open() as connection:
            rows = [
                connection.execute("SELECT hash, key FROM traces WHERE hash = ?", [one]).fetchone()
                for one in set(hashes)
            ]
        return {
            row["hash"]: f"{json.loads(row['key'])}\n".startswith(f"{first_line}\n")
            for row in rows
            if row is not None
        }

    def trace(self, content_hash: str) -> dict[str, Any]:
        """Returns a trace with all steps of its trajectory, and of a pruned buffer the steps'
        weights and the cut ones. Raises DataError: there is none."""
        with self._open() as connection:
            row = connection.execute(
                f"SELECT hash, id, evicted_at, {COLUMNS} FROM traces WHERE hash = ? ORDER BY"
                " evicted_at IS NOT NULL",
                [content_hash],
            ).fetchone()
            if row is None:
                raise DataError(f"the buffer holds no trace '{content_hash}'", code="trace-missing")
            prefixed = ", ".join(f"t.{name}" for name in COLUMNS.split(", "))
            steps = connection.execute(
                f"SELECT t.hash, m.position AS place, {prefixed} FROM members m JOIN traces t ON"
                " t.id = m.trace WHERE m.source = ? AND m.task_id = ? AND m.trajectory = ? ORDER"
                f" BY m.position, t.id LIMIT {_MAX_STEPS}",
                [row["source"], row["task_id"], row["trajectory"]],
            )
            shown = _all_shown(steps)
            place = (row["source"], row["task_id"], row["trajectory"])
            notes = [parse_json(note[-1]) for note in pruning_rows(connection, *place)]
        return _shown(row) | {
            "is_evicted": row["evicted_at"] is not None,
            "steps": shown,
            "pruning": notes[0] if notes else None,
        }


def _all_shown(rows: Iterable[sqlite3.Row]) -> list[dict[str, Any]]:
    shown, left = list[dict[str, Any]](), _MAX_BYTES
    for row in rows:
        left -= len(row["key"]) + len(row["value"])
        if left < 0:
            raise DataError(
                f"these traces have more than {_MAX_BYTES >> 20} MB of text",
                code="buffer-traces-long",
            )
        shown.append(_shown(row))
    return shown


def _shown(row: sqlite3.Row) -> dict[str, Any]:
    value = content_from_json(json.loads(row["value"]))
    names = ("hash", "reward", "source", "task_id", "position", "trajectory", "policy_version")
    return {name: row[name] for name in names} | {
        "terminal": bool(row["terminal"]),
        "key": json.loads(row["key"]),
        "text": value if isinstance(value, str) else None,
        "content": None if isinstance(value, str) else asdict(value),
    }
