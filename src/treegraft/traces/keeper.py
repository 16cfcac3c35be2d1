"""Keeps the index of a buffer up to date: built in a background thread, swapped in whole, saved
beside the buffer.

The file is one line of JSON (rows, their checksum, the checksum of the rest) and the index as FAISS
writes it. It holds nothing that the buffer does not: where it is missing, damaged or of other rows,
it is made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from pathlib import Path

import numpy as np

from treegraft.core.errors import DataError
from treegraft.tools.search.nearest import FLAT_LIMIT, IvfIndex, num_fitted, num_indexed
from treegraft.traces.rows import Rows

FORMAT = 1
"""Of the file; raised whenever an index is built in another way."""


class IndexKeeper:
    """Holds the index in use. One thread calls its methods; `current` may be read from any."""

    def __init__(self, path: Path, encoder: str) -> None:
        """Args:
        path: of the index file.
        encoder: its name goes into the checksum of rows.
        """
        self.path = path
        self.current: IvfIndex | None = None
        """What to search with; None means exactly."""
        self._encoder = encoder
        self._rows: Rows | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._problem: Exception | None = None
        # Guards `_rows` and the end of the thread, so that no request falls between two builds.
        self._lock = threading.Lock()

    def load(self, rows: Rows) -> None:
        """Takes the saved index where it is whole and of these rows."""
        try:
            with self.path.open("rb") as file:
                header = json.loads(file.readline(4096))
                body = np.fromfile(file, np.uint8)
            num, fitted = int(header["rows"]), int(header["fitted"])
            is_ours = (
                header["format"] == FORMAT
                and header["faiss"] == _faiss_version()
                and header["content"] == self._checksum(rows, num)
            )
            if (
                is_ours
                and num <= num_indexed(len(rows))
                and header["body"] == hashlib.blake2b(body.data).hexdigest()
            ):
                self.current = IvfIndex.from_bytes(body, fitted)
        except (OSError, ValueError, KeyError, TypeError):
            pass  # none there, or damaged: it is built again

    def refresh(self, rows: Rows) -> None:
        """Sees to it that the index comes to hold what it should of these rows; returns at once."""
        if np.count_nonzero(rows.live) <= FLAT_LIMIT or not self._is_behind(rows):
            return
        with self._lock:
            self._rows = rows
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="trace index", daemon=True)
                self._thread.start()

    def settle(self) -> None:
        """Waits for the thread. Raises DataError where the index could not be built or saved."""
        thread = self._thread
        if thread is not None:
            thread.join()
        problem, self._problem = self._problem, None
        if problem is not None:
            raise DataError(
                f"index '{self.path}': {problem}; searches stay exact and slow. Free memory or disk"
                " space"
            ) from problem

    def stop(self) -> None:
        """Ends the thread, within about a second, and lets go of the index."""
        self._stopping.set()
        thread = self._thread
        if thread is not None:
            thread.join()
        self._stopping.clear()
        self._rows, self.current, self._problem = None, None, None

    def copy_to(self, path: Path) -> None:
        """Copies the saved index, or removes a stale one there where none is saved."""
        if not self.path.exists():
            path.unlink(missing_ok=True)
            return
        partial = path.with_name(f".{path.name}.partial")
        shutil.copyfile(self.path, partial)
        os.replace(partial, path)

    def _is_behind(self, rows: Rows) -> bool:
        index = self.current
        return index is None or (index.num_rows, index.num_fitted) != (
            num_indexed(len(rows)),
            num_fitted(len(rows)),
        )

    def _work(self) -> None:
        while True:
            with self._lock:
                rows, self._rows = self._rows, None
                if rows is None or self._stopping.is_set() or self._problem is not None:
                    self._thread = None
                    return
            try:
                built = IvfIndex.build(rows.vectors, self.current, self._stopping.is_set)
                if built is not None:
                    self.current = built
                    self._save(built, rows)
            except Exception as error:  # the thread has nobody to tell; `settle` does
                self._problem = error

    def _save(self, index: IvfIndex, rows: Rows) -> None:
        body = index.to_bytes()
        header = {
            "format": FORMAT,
            "faiss": _faiss_version(),
            "rows": index.num_rows,
            "fitted": index.num_fitted,
            "content": self._checksum(rows, index.num_rows),
            "body": hashlib.blake2b(body.data).hexdigest(),
        }
        partial = self.path.with_name(f".{self.path.name}.partial")
        with partial.open("wb") as file:
            file.write(json.dumps(header).encode() + b"\n")
            file.write(body.data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self.path)

    def _checksum(self, rows: Rows, num: int) -> str:
        digest = hashlib.blake2b(self._encoder.encode(), digest_size=16)
        digest.update(rows.hashes[:num].tobytes())
        return digest.hexdigest()


def _faiss_version() -> str:
    import faiss

    return str(faiss.__version__)
