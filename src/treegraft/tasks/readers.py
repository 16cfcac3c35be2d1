"""Rows from JSONL, JSON, CSV and parquet files and from the hub, one at a time."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treegraft.core.errors import DataError, SettingError, nearest_file
from treegraft.core.given import GIVEN
from treegraft.core.import_paths import load_object
from treegraft.core.packages import require
from treegraft.core.text import TAGS

HUB = "hub:"
_BATCH_ROWS = 64
"""So few, since a file of some kilobytes may hold a long text in every row."""
_MAX_CELL = 10_000_000
"""Characters; the csv module's own limit is shorter than some questions with their context."""


@dataclass(frozen=True, slots=True)
class Row:
    """Row(number=0, values={"question": "1 + 1 ?", "answer": "2"})"""

    number: int
    """Position in its source, from 0."""
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BadRow:
    """BadRow(reason="line 3 is not JSON (...) and was left out")"""

    reason: str


def read_rows(spec: str, default_split: str) -> Iterator[Row | BadRow]:
    """Yields the rows of a file or of "hub:NAME:CONFIG/SPLIT", of which CONFIG and SPLIT may be
    left out.

    Raises:
        SettingError: an unknown kind of file, or a package that is missing.
        DataError: a file or data set that is missing or cannot be read, or an environment variable
            that is not set.
    """
    if spec.startswith(HUB):
        return _read_hub(spec, default_split)
    if spec.startswith(GIVEN):
        return (Row(number, values) for number, values in enumerate(load_object(spec)))
    path = _resolve(spec)
    read = FILE_TYPES.get(path.suffix.lower())
    # By suffix, not by contents: JSON and JSONL begin alike.
    if read is None:
        raise SettingError(
            f"'{spec}' is no kind of file that can be read; expected {', '.join(FILE_TYPES)} or"
            " 'hub:NAME:CONFIG/SPLIT'",
            code="file-kind-unknown",
        )
    return read(path)


def words_in(spec: str) -> list[str]:
    """Returns the words of all texts in the rows, sorted; a tag parts words as a blank does. Raises
    as `read_rows`."""
    words: set[str] = set()
    for row in read_rows(spec, "train"):
        for text in _texts(row.values) if isinstance(row, Row) else ():
            words.update(re.sub(TAGS, " ", text).split())
    return sorted(words)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(one)


def source_names(specs: Sequence[str]) -> dict[str, str]:
    """Returns a short and unique name for each source, for the ids of its tasks."""
    names: dict[str, str] = {}
    for spec in dict.fromkeys(specs):
        if spec.startswith((HUB, GIVEN)):
            name = spec.removeprefix(HUB).removeprefix(GIVEN).replace(":", "/")
        else:
            name = Path(spec).stem
        # Two files of one name would give two tasks the same id.
        free = name
        number = 1
        while free in names.values():
            number += 1
            free = f"{name}-{number}"
        names[spec] = free
    return names


def _resolve(spec: str) -> Path:
    expanded = os.path.expanduser(os.path.expandvars(spec))
    # A variable that is not set is left as it stands.
    if "$" in expanded:
        raise DataError(
            f"'{spec}' names an environment variable that is not set; set it, or write the path"
            " out",
            code="path-variable-unset",
        )
    path = Path(expanded)
    if not path.is_file():
        given = "" if spec == str(path) else f" (given as '{spec}')"
        raise DataError(
            f"there is no file '{path}'{given}; expected a .jsonl, .json, .csv or .parquet file (of"
            f" a folder each by its name), or 'hub:NAME:CONFIG/SPLIT'.{nearest_file(path)}",
            code="data-missing",
        )
    return path


def _read_jsonl(path: Path) -> Iterator[Row | BadRow]:
    number = -1
    with _opened(path) as file:
        for line_number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            number += 1
            try:
                # The byte order mark that some editors write is no JSON.
                values = json.loads(line.decode("utf-8-sig" if line_number == 1 else "utf-8"))
            except (ValueError, RecursionError) as error:
                yield BadRow(f"line {line_number} is not JSON ({error}) and was left out")
                continue
            yield _row(number, values, f"line {line_number}")


def _read_json(path: Path) -> Iterator[Row | BadRow]:
    """A list of objects, or lines of objects."""
    with _opened(path) as file:
        text = file.read()
    # Many files of lines are named .json.
    if text.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] != b"[":
        yield from _read_jsonl(path)
        return
    try:
        rows = json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"'{path}' is not JSON: {error}; expected a list of objects, or one object a line",
            code="data-no-json",
        ) from error
    for number, values in enumerate(rows):
        yield _row(number, values, f"entry {number + 1}")


def _read_csv(path: Path) -> Iterator[Row | BadRow]:
    """Rows below a line of column names; every value is a text."""
    csv.field_size_limit(_MAX_CELL)
    number = -1
    with _opened(path) as file:
        try:
            text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
            reader = csv.DictReader(text, strict=True)
            # Spreadsheets write empty columns without a name; of two with one, the first is lost.
            names = [name for name in reader.fieldnames or () if name]
            if len(set(names)) < len(names):
                raise DataError(
                    f"'{path}' has several columns of one name among {', '.join(names)}; expected"
                    " each name once. Rename or remove columns.",
                    code="columns-repeated",
                )
            for number, values in enumerate(reader):
                # The reader keeps cells beyond the columns under None, and fills up missing ones.
                if None in values or None in values.values():
                    yield BadRow(f"row {number} has not a cell for each column; it was left out")
                else:
                    yield Row(number, values)
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(
                f"'{path}' cannot be read as CSV after {number + 1} rows: {error}; expected UTF-8,"
                " commas, and double quotes around cells that hold either",
                code="csv-unreadable",
            ) from error


def _row(number: int, values: Any, place: str) -> Row | BadRow:
    if isinstance(values, dict):
        return Row(number, values)
    return BadRow(f"{place} is a JSON {type(values).__name__}, expected an object; it was left out")


def _read_parquet(path: Path) -> Iterator[Row | BadRow]:
    require(f"reading '{path}'", "pyarrow")
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        # In batches: row groups of published files are often larger than memory.
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                for values in batch.to_pylist():
                    yield Row(number, values)
                    number += 1
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(
            f"'{path}' cannot be read as parquet after {number} rows: {error}",
            code="parquet-unreadable",
        ) from error


def _read_hub(spec: str, default_split: str) -> Iterator[Row | BadRow]:
    require(f"the data set '{spec}'", "datasets")
    from datasets import load_dataset

    name, _, place = spec.removeprefix(HUB).partition(":")
    # A name without a slash is the split, which every set has.
    config, _, split = place.rpartition("/")
    try:
        # Every failure of the hub's client (no network, no such set, no such split) means the same
        # here.
        data = load_dataset(name, *([config] if config else []), split=split or default_split)
    except Exception as error:
        raise DataError(
            f"the data set '{name}' (split '{place or default_split}') could not be loaded:"
            f" {error}. Expected 'hub:NAME:CONFIG/SPLIT' (or 'hub:NAME:SPLIT', or 'hub:NAME') with"
            " the name it has on the hub, and a network or a filled cache",
            code="hub-set-not-loaded",
        ) from error
    for number, values in enumerate(data):
        yield Row(number, dict(values))


def _opened(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise DataError(f"'{path}' cannot be opened: {error}", code="data-not-opened") from error


FILE_TYPES: Mapping[str, Callable[[Path], Iterator[Row | BadRow]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
"""Kinds of files that can be read, by their suffix."""
