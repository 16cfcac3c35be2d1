"""Tasks from files (JSONL, JSON, parquet) or the hub: columns by setting, defects counted and
reported.

A row that cannot be used is left out and counted. What makes the whole source useless is an error:
a file that is missing, a column that no row has, no usable row at all.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from treegraft.core.errors import DataError, SettingError, nearest
from treegraft.core.types import Task
from treegraft.settings.tasks import DatasetSettings
from treegraft.tasks.open import OpenTasks
from treegraft.tasks.readers import HUB, BadRow, Row, read_rows, source_names

# Tabs and line breaks belong to text; the others are mostly what a lost backslash leaves: a form
# feed and "rac".
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


class DatasetSource(OpenTasks):
    """Tasks of a data set, training and held-out."""

    def __init__(self, settings: DatasetSettings, *, num_train: int, num_eval: int) -> None:
        """Raises SettingError where neither training nor evaluation files are named."""
        if not settings.train and not settings.eval:
            raise SettingError(
                "tasks.kind is 'dataset', but tasks.dataset.train and tasks.dataset.eval are empty;"
                " name a .jsonl, .json or .parquet file, or 'hub:NAME[:SPLIT]'"
            )
        self._settings = settings
        self._num_train = num_train
        self._num_eval = num_eval
        self._names = source_names([*settings.train, *settings.eval])

    def train_tasks(self) -> Sequence[Task]:
        """Returns the first `num_train` usable rows that are not held out.

        Raises:
            SettingError: no training files are named.
            DataError: a file is missing or unreadable, no row has a column that the settings name,
                or none is usable.
        """
        if not self._settings.train:
            raise SettingError(
                "tasks.dataset.train is empty; name the training files, or only evaluate"
            )
        return self._train[0]

    def eval_tasks(self) -> Sequence[Task]:
        """Returns the first `num_eval` usable rows of the evaluation files; without any, the last
        training rows.

        Raises:
            DataError: as `train_tasks`, or there are too few training rows to hold any out.
        """
        return self._eval.tasks if self._settings.eval else self._train[1]

    def report(self) -> Sequence[str]:
        """Returns the defects found, one sentence each. Reads the files; raises as `train_tasks`
        does."""
        parts = [self._scan] if self._settings.train else []
        parts += [self._eval] if self._settings.eval else []
        sentences = [sentence for part in parts for sentence in part.sentences()]
        if len(parts) == 2:
            num_shared = len(parts[0].questions & parts[1].questions)
            if num_shared:
                sentences.append(
                    "questions of the evaluation files that also occur in the training files:"
                    f" {num_shared}; results on them are not held-out results"
                )
        return tuple(sentences)

    @cached_property
    def _scan(self) -> _Scan:
        num_held_out = 0 if self._settings.eval else self._num_eval
        return _scan(
            self._settings.train, self._names, self._settings, self._num_train, num_held_out
        )

    @cached_property
    def _eval(self) -> _Scan:
        return _scan(self._settings.eval, self._names, self._settings, self._num_eval, 0)

    @cached_property
    def _train(self) -> tuple[tuple[Task, ...], tuple[Task, ...]]:
        """Training and held-out tasks of the training files."""
        scan = self._scan
        num_left = scan.num_usable - len(scan.last)
        if num_left < 1:
            raise DataError(
                f"{', '.join(self._settings.train)}: {scan.num_usable} usable rows are too few to"
                f" hold out tasks.num_eval = {self._num_eval} of them; lower it, or name evaluation"
                " files in tasks.dataset.eval"
            )
        return tuple(scan.tasks[:num_left]), tuple(scan.last)


@dataclass(slots=True)
class _Scan:
    """What one pass over some sources found."""

    tasks: list[Task] = field(default_factory=list)
    """The first usable rows."""
    last: deque[Task] = field(default_factory=deque)
    """The last usable rows."""
    num_usable: int = 0
    defects: dict[str, _Defects] = field(default_factory=dict)
    """By source, in the order of reading."""
    questions: set[bytes] = field(default_factory=set)
    """Digests of the questions, white space squeezed."""
    pairs: set[bytes] = field(default_factory=set)
    """Digests of question and reference."""

    def sentences(self) -> list[str]:
        return [
            sentence
            for spec, defects in self.defects.items()
            for sentence in defects.sentences(_short(spec))
        ]


@dataclass(slots=True)
class _Defects:
    """What is wrong with the rows of one source."""

    counts: Counter[str] = field(default_factory=Counter)
    """Rows by what is wrong with them."""
    control_columns: Counter[str] = field(default_factory=Counter)
    """Rows by a further column that holds control characters."""
    unreadable: list[str] = field(default_factory=list)
    columns: set[str] = field(default_factory=set)
    """Of the rows that lacked one that the settings name."""
    num_rows: int = 0

    def sentences(self, name: str) -> list[str]:
        told = [f"{name}: {sentence}" for sentence in self.unreadable[:3]]
        if len(self.unreadable) > 3:
            told.append(
                f"{name}: {len(self.unreadable) - 3} more rows could not be read and were left out"
            )
        for what, count in self.counts.items():
            rows, fate = ("row", "was") if count == 1 else ("rows", "were")
            told.append(
                f"{name}: {count} {rows} {what} {fate} {'kept' if what in _KEPT else 'left out'}"
            )
        for column, count in self.control_columns.items():
            told.append(
                f"{name}: {count} row{_s(count)} with control characters in the column '{column}'"
            )
        return told


_NO_QUESTION = "without a question"
_NO_REFERENCE = "without a reference"
_NO_MARK = "without the mark of tasks.dataset.reference_after"
_NO_COLUMN = "without a column that the settings name"
_REPEATED = "with a question and reference that occurred before"
_OTHER_REFERENCE = "with a question that occurred before but another reference"
_CONTROL_QUESTION = "with control characters in the question"
_KEPT = (_OTHER_REFERENCE, _CONTROL_QUESTION)


def _scan(
    specs: Sequence[str],
    names: Mapping[str, str],
    settings: DatasetSettings,
    num_first: int,
    num_last: int,
) -> _Scan:
    scan = _Scan(last=deque(maxlen=num_last))
    for spec in dict.fromkeys(specs):
        defects = scan.defects.setdefault(spec, _Defects())
        num_before = scan.num_usable
        default_split = "test" if spec in settings.eval and spec not in settings.train else "train"
        for row in read_rows(spec, default_split):
            defects.num_rows += 1
            task = _read_row(row, names[spec], settings, defects)
            if task is not None and _is_new(task, scan, defects):
                scan.num_usable += 1
                scan.last.append(task)
                if len(scan.tasks) < num_first:
                    scan.tasks.append(task)
        if scan.num_usable == num_before:
            _refuse_source(spec, defects, settings)
    return scan


def _read_row(
    row: Row | BadRow, name: str, settings: DatasetSettings, defects: _Defects
) -> Task | None:
    """Returns the row as a task; None, and the defect counted, where it is of no use."""
    if isinstance(row, BadRow):
        defects.unreadable.append(row.reason)
        return None
    try:
        question = _column(row.values, settings.question_column)
        reference = (
            _column(row.values, settings.reference_column) if settings.reference_column else None
        )
        category = (
            ""
            if settings.category_column is None
            else _column(row.values, settings.category_column)
        )
    except KeyError:
        defects.counts[_NO_COLUMN] += 1
        defects.columns |= set(_column_names(row.values))
        return None
    if question is None or not str(question).strip():
        defects.counts[_NO_QUESTION] += 1
        return None
    accepted = _references(reference)
    if accepted and settings.reference_after is not None:
        accepted = _after_mark(accepted, settings.reference_after)
        if not accepted:
            defects.counts[_NO_MARK] += 1
            return None
    if not accepted and settings.reference_column:
        defects.counts[_NO_REFERENCE] += 1
        return None
    used = (settings.question_column, settings.reference_column)
    for column, value in row.values.items():
        if not settings.question_column.startswith(column) and _has_control(value):
            defects.control_columns[column] += 1
    return Task(
        id=f"{name}/{row.number}",
        question=str(question),
        reference=accepted,
        category="" if category is None else str(category),
        columns={column: value for column, value in row.values.items() if column not in used},
    )


def _is_new(task: Task, scan: _Scan, defects: _Defects) -> bool:
    """Returns False, and counts it, where question and reference occurred before."""
    question = " ".join(task.question.split())
    key, pair_key = _digest(question), _digest(question, *task.reference)
    is_repeated = pair_key in scan.pairs
    if is_repeated:
        defects.counts[_REPEATED] += 1
    elif key in scan.questions:
        defects.counts[_OTHER_REFERENCE] += 1
    scan.questions.add(key)
    scan.pairs.add(pair_key)
    if not is_repeated and _CONTROL.search(task.question):
        defects.counts[_CONTROL_QUESTION] += 1
    return not is_repeated


def _refuse_source(spec: str, defects: _Defects, settings: DatasetSettings) -> None:
    """Raises DataError for a source without a usable row, naming the likeliest reason."""
    if defects.num_rows == 0:
        raise DataError(f"'{spec}' has no rows; expected one question per row")
    if defects.counts[_NO_COLUMN]:
        wanted = {
            "question_column": settings.question_column,
            "reference_column": settings.reference_column or None,
            "category_column": settings.category_column,
        }
        for setting, column in wanted.items():
            if column is not None and column not in defects.columns:
                raise DataError(
                    f"'{spec}' has no column '{column}'"
                    f" (tasks.dataset.{setting}).{nearest(column, defects.columns)} It has"
                    f" {', '.join(sorted(defects.columns))}"
                )
    found = "; ".join(defects.sentences(_short(spec))) or "every row repeats one of an earlier file"
    raise DataError(f"'{spec}' has no usable row among {defects.num_rows}: {found}")


def _column(values: Mapping[str, Any], name: str) -> Any:
    """Returns a column, or what dots in its name reach inside structs. Raises KeyError where there
    is none."""
    if name in values:
        return values[name]
    value: Any = values
    for part in name.split("."):
        if not isinstance(value, Mapping):
            raise KeyError(name)
        value = value[part]
    return value


def _column_names(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        yield prefix + name
        if isinstance(value, Mapping):
            yield from _column_names(value, f"{prefix}{name}.")


def _references(value: Any) -> tuple[str, ...]:
    """Returns the accepted answers that are not blank."""
    values = value if isinstance(value, (list, tuple)) else [value]
    texts = (
        str(one).strip()
        for one in values
        if one is not None and not (isinstance(one, float) and math.isnan(one))
    )
    return tuple(dict.fromkeys(text for text in texts if text))


def _after_mark(references: Sequence[str], mark: str) -> tuple[str, ...]:
    marked = (
        reference.rpartition(mark)[2].strip() for reference in references if mark in reference
    )
    return tuple(text for text in marked if text)


def _has_control(value: Any) -> bool:
    if isinstance(value, str):
        return _CONTROL.search(value) is not None
    if isinstance(value, Mapping):
        return any(map(_has_control, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_has_control, value))


def _short(spec: str) -> str:
    return spec if spec.startswith(HUB) else spec.rpartition("/")[2]


def _digest(*texts: str) -> bytes:
    return hashlib.blake2b(
        "\x1f".join(texts).encode("utf-8", "surrogatepass"), digest_size=16
    ).digest()


def _s(count: int) -> str:
    return "" if count == 1 else "s"
