"""Results of tool calls in one SQLite file, for later runs.

Errors are never stored. Several processes may share a file.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import threading
from pathlib import Path

from treegraft.core.errors import DataError

_WAIT_S = 10.0
"""Longest wait for another process that writes."""


class ResultCache:
    """Texts of successful calls by tool, by the tool's fingerprint, and by body."""

    def __init__(self, path: str) -> None:
        """Opens the file; creates a missing one. Raises `DataError` for a file that cannot be
        opened or is no cache."""
        self.path = os.path.expanduser(os.path.expandvars(path))
        self._lock = threading.Lock()
        try:
            Path(self.path).parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(
                self.path, timeout=_WAIT_S, check_same_thread=False, isolation_level=None
            )
            # Readers of other processes do not wait for a writer.
            self._database.execute("PRAGMA journal_mode = WAL")
            # Results that a crash of the machine loses are computed again.
            self._database.execute("PRAGMA synchronous = OFF")
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS results (key BLOB PRIMARY KEY, tool TEXT, body TEXT,"
                " text TEXT)"
            )
        except (OSError, sqlite3.Error) as error:
            raise DataError(
                f"tool cache '{self.path}': it cannot be opened: {error}. Check tools.cache_path.",
                settings=["tools.cache_path"],
                code="cache-not-opened",
            ) from error

    def get(self, tool: str, fingerprint: str, body: str) -> str | None:
        """Returns the text of a call, None where it is missing. Raises `sqlite3.Error` for a
        damaged file."""
        with self._lock:
            row = self._database.execute(
                "SELECT text FROM results WHERE key = ?", (_key(tool, fingerprint, body),)
            ).fetchone()
        return None if row is None else str(json.loads(row[0]))

    def put(self, tool: str, fingerprint: str, body: str, text: str) -> None:
        """Stores the text of a successful call. Raises `sqlite3.Error` for a full disk or a damaged
        file."""
        # Tool and body in clear, for people who open the file; the key alone is asked for.
        row = (_key(tool, fingerprint, body), tool, json.dumps(body), json.dumps(text))
        with self._lock:
            self._database.execute("INSERT OR REPLACE INTO results VALUES (?, ?, ?, ?)", row)

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._database.close()


def _key(*parts: str) -> bytes:
    # JSON: lone surrogates have no UTF-8, and lists keep the parts apart.
    return hashlib.sha256(json.dumps(parts).encode("ascii")).digest()
