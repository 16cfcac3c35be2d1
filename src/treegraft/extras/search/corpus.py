"""A corpus of passages in a JSONL file of {"id", "contents"} rows (the format of FlashRAG and
Search-R1).

The file may be larger than memory: it is read once from beginning to end while an index is made,
and later row by row, by where each row begins.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from treegraft import DataError, SettingError, ToolUnavailable
from treegraft.parts import errors, interfaces


@dataclass(frozen=True, slots=True)
class Row:
    """Row(offset=0, id="12", contents="Paris ...")"""

    offset: int
    """Where its line begins, in bytes."""
    id: str | int
    contents: str


def corpus_path(corpus: str) -> Path:
    """Returns the file that a setting names; "~" and variables such as $TREEGRAFT_DATA are
    expanded.

    Raises:
        SettingError: the setting is empty.
        DataError: there is no such file.
    """
    if not corpus.strip():
        raise SettingError(
            "tools.search.corpus is empty; set it to a JSONL file of rows with 'id' and"
            " 'contents'.",
            code="corpus-unnamed",
        )
    path = os.path.expanduser(os.path.expandvars(corpus))
    if not os.path.isfile(path):
        # What is left of a variable after expansion.
        unset = re.search(r"\$\{?\w+\}?", path)
        near = f" Check tools.search.corpus.{errors.nearest_file(Path(path))}"
        hint = f" The variable {unset.group()} is not set." if unset else near
        raise DataError(f"corpus '{path}': there is no such file.{hint}", code="corpus-missing")
    return Path(path)


def read_rows(path: Path) -> Iterator[Row]:
    """Yields all rows, in order, one in memory at a time; blank lines are skipped.

    Raises:
        DataError: a bad row, by line; a file that cannot be read or has no rows.
    """
    offset = 0
    num_rows = 0
    try:
        # As bytes: text mode cannot tell where a line begins in the file.
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    num_rows += 1
                    yield Row(offset, *_parse(line, f"corpus '{path}', line {number}"))
                offset += len(line)
    except OSError as error:
        raise DataError(
            f"corpus '{path}': it cannot be read: {error.strerror}", code="corpus-unreadable"
        ) from error
    if not num_rows:
        raise DataError(
            f'corpus \'{path}\': it has no rows; each line should be {{"id": ..., "contents":'
            " ...}.",
            code="corpus-empty",
        )


def checksum(path: Path) -> str:
    """Returns a hash of the whole file. Raises `DataError` where it cannot be read."""
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
    except OSError as error:
        raise DataError(
            f"corpus '{path}': it cannot be read: {error.strerror}", code="corpus-unreadable"
        ) from error
    return digest.hexdigest()


class Corpus:
    """Passages by row. Nothing of the text is in memory; several threads may read at once."""

    def __init__(self, path: Path, offsets: npt.NDArray[np.uint64]) -> None:
        """Args:
        offsets: [rows] where each row begins, in bytes, as `read_rows` gives them.
        """
        self.path = path
        self._offsets = offsets
        # Opened once: were the file replaced, its offsets would no longer fit.
        self._file = os.open(path, os.O_RDONLY)
        self._state = self._look()

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, rows: Sequence[int], scores: Sequence[float]) -> list[interfaces.Passage]:
        """Returns these rows as passages with these scores.

        Raises:
            ToolUnavailable: the file has been changed or has become unreadable since it was
                opened.
        """
        passages = []
        try:
            # In a changed file the offsets point into the middle of rows.
            if self._look() != self._state:
                raise ToolUnavailable(
                    f"corpus '{self.path}' was changed while it was in use; restart to index it"
                    " again",
                    code="corpus-changed",
                )
            for row, score in zip(rows, scores, strict=True):
                is_last = row + 1 == len(self._offsets)
                start = int(self._offsets[row])
                end = self._state[0] if is_last else int(self._offsets[row + 1])
                # Unlike seek and read, this needs no lock between threads.
                line = os.pread(self._file, end - start, start)
                passages.append(
                    interfaces.Passage(*_parse(line, f"corpus '{self.path}', row {row}"), score)
                )
        except (OSError, DataError) as error:
            raise ToolUnavailable(
                f"corpus '{self.path}' can no longer be read: {error}", code="corpus-gone"
            ) from error
        return passages

    def close(self) -> None:
        """Closes the file; closing twice does no harm."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _look(self) -> tuple[int, int]:
        state = os.fstat(self._file)
        return state.st_size, state.st_mtime_ns


def _parse(line: bytes, place: str) -> tuple[str | int, str]:
    try:
        # A row read by its place may have blank lines behind it, which JSON allows.
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}: not UTF-8 ({error.reason} at byte {error.start}).", code="corpus-not-utf8"
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not JSON ({error}).", code="corpus-row-no-json") from error
    if not isinstance(row, dict):
        raise DataError(
            f"{place}: got a JSON {type(row).__name__}, expected an object with 'id' and"
            " 'contents'.",
            code="corpus-row-invalid",
        )
    kinds: dict[str, tuple[type[Any], ...]] = {"id": (str, int), "contents": (str,)}
    for key, expected in kinds.items():
        if key not in row:
            raise DataError(
                f"{place}: it has no '{key}'; it has {', '.join(sorted(row)) or 'no keys'}.",
                code="corpus-key-missing",
            )
        if not isinstance(row[key], expected):
            raise DataError(
                f"{place}: '{key}' is {type(row[key]).__name__}, expected {expected[0].__name__}.",
                code="corpus-value-invalid",
            )
    return row["id"], row["contents"]
