"""Tasks from files (JSONL, JSON, parquet) or the hub: columns by setting, defects counted and
reported.

A row that cannot be used is left out and counted. A source that cannot be used is an error: a
missing file, a column that no row has, no usable row.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from treegraft.core.errors import DataError, SettingError, about, nearest
from treegraft.core.types import SYSTEM_ROLES, Task
from treegraft.settings.tasks import DatasetSettings
from treegraft.tasks.fields import (
    Defects,
    accepted_answers,
    after_mark,
    are_messages,
    find_value,
    is_nested,
    last_question,
    nested_columns,
    read_messages,
)
from treegraft.tasks.open import OpenTasks
from treegraft.tasks.readers import HUB, BadRow, Row, read_rows, source_names


class DatasetSource(OpenTasks):
    """Tasks of a data set, training and held-out."""

    def __init__(self, settings: DatasetSettings, *, num_train: int, num_eval: int) -> None:
        """Raises SettingError where neither training nor evaluation files are named."""
        if not settings.train and not settings.eval:
            raise SettingError(
                "tasks.kind is 'dataset', but tasks.dataset.train and tasks.dataset.eval are empty;"
                " name a .jsonl, .json, .csv or .parquet file, or 'hub:NAME:CONFIG/SPLIT'",
                code="dataset-unnamed",
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
        # Evaluating alone needs none, so this is no check of the settings.
        if not self._settings.train:
            raise SettingError(
                "tasks.dataset.train is empty; name the training files, or only evaluate",
                code="train-files-unnamed",
            )
        return self._train[0]

    def eval_tasks(self) -> Sequence[Task]:
        """Returns the first `num_eval` usable rows of the evaluation files; without any, the last
        training rows.

        Raises:
            DataError: as `train_tasks`, or there is a single training row.
        """
        return self._eval.tasks if self._settings.eval else self._train[1]

    def vocabulary(self) -> Sequence[str]:
        """Returns the words of the rows, for the tiny model: of questions, references and columns
        of text. Reads the files; raises as `train_tasks` does."""
        tasks = [*(self.train_tasks() if self._settings.train else ()), *self.eval_tasks()]
        words: set[str] = set()
        for task in tasks:
            for value in (task.question, *task.reference, *task.columns.values()):
                if isinstance(value, str):
                    words.update(value.split())
        return sorted(words)

    def report(self) -> Sequence[str]:
        """Returns the defects found, one sentence each. Reads the files; raises as `train_tasks`
        does."""
        scans = [self._training] if self._settings.train else []
        scans += [self._eval] if self._settings.eval else []
        sentences: list[str] = []
        for scan in scans:
            for spec, defects in scan.defects.items():
                sentences += defects.summary(spec)
        if self._settings.train and self._has_too_few:
            num_train, num_eval = map(len, self._train)
            sentences.append(
                f"tasks.num_eval is {self._num_eval}, but there are only {num_train + num_eval}"
                f" usable rows: the last {num_eval} are held out, and {num_train} train"
            )
        if len(scans) == 2 and (num_shared := len(scans[0].questions & scans[1].questions)):
            sentences.append(
                "questions of the evaluation files that also occur in the training files:"
                f" {num_shared}; results on them are not held-out results"
            )
        return tuple(sentences)

    @cached_property
    def _training(self) -> _Scan:
        # Without evaluation files the last training rows are held out.
        num_held_out = 0 if self._settings.eval else self._num_eval
        with about("tasks.dataset.train"):
            return self._scan(self._settings.train, self._num_train, num_held_out)

    @cached_property
    def _eval(self) -> _Scan:
        with about("tasks.dataset.eval"):
            return self._scan(self._settings.eval, self._num_eval, 0)

    @cached_property
    def _train(self) -> tuple[tuple[Task, ...], tuple[Task, ...]]:
        """Training and held-out tasks of the training files."""
        scan = self._training
        held_out = tuple(scan.last)
        if self._has_too_few:
            # A fifth, so that a small file still trains.
            held_out = held_out[-max(1, scan.num_usable // 5) :]
        num_left = scan.num_usable - len(held_out)
        if num_left < 1:
            raise DataError(
                f"{', '.join(self._settings.train)}: one usable row is too few to train and to"
                " evaluate; name evaluation files in tasks.dataset.eval",
                settings=["tasks.dataset.train", "tasks.dataset.eval"],
                code="one-row",
            )
        return tuple(scan.tasks[:num_left]), held_out

    @property
    def _has_too_few(self) -> bool:
        """Whether all training rows would be held out."""
        return 0 < self._training.num_usable <= len(self._training.last)

    def _scan(self, specs: Sequence[str], num_first: int, num_last: int) -> _Scan:
        settings = self._settings
        scan = _Scan(last=deque(maxlen=num_last))
        for spec in dict.fromkeys(specs):  # a file named twice is read once
            defects = scan.defects.setdefault(spec, _FileDefects())
            num_before = scan.num_usable
            # The split of a hub's data set that names none.
            is_eval = spec in settings.eval and spec not in settings.train
            for row in read_rows(spec, "test" if is_eval else "train"):
                defects.num_rows += 1
                if isinstance(row, BadRow):
                    defects.unreadable.append(row.reason)
                    continue
                task = _read_row(row, self._names[spec], settings, defects)
                if task is not None and scan.adds(task, row.number, defects):
                    scan.num_usable += 1
                    scan.last.append(task)
                    if len(scan.tasks) < num_first:
                        scan.tasks.append(task)
            # A file without use is a mistake in the settings, even where the others are fine.
            if scan.num_usable == num_before:
                _refuse_source(spec, defects, settings)
        return scan


@dataclass(slots=True)
class _FileDefects(Defects):
    """The defects of one source, and the facts that tell why none of its rows can be used."""

    unreadable: list[str] = field(default_factory=list)
    columns: set[str] = field(default_factory=set)
    """Of the rows that lacked one that the settings name."""
    num_rows: int = 0

    def summary(self, spec: str) -> list[str]:
        name = spec if spec.startswith(HUB) else spec.rpartition("/")[2]
        sentences = [*self.unreadable[:3]]
        if len(self.unreadable) > 3:
            sentences.append(
                f"{len(self.unreadable) - 3} more rows could not be read and were left out"
            )
        sentences += self.sentences(kept=_OTHER_REFERENCE)
        return [f"{name}: {sentence}" for sentence in sentences]


@dataclass(slots=True)
class _Scan:
    """The result of one pass over some sources."""

    tasks: list[Task] = field(default_factory=list)
    """The first usable rows."""
    last: deque[Task] = field(default_factory=deque)
    """The last usable rows."""
    num_usable: int = 0
    defects: dict[str, _FileDefects] = field(default_factory=dict)
    """By source, in the order of reading."""
    questions: set[bytes] = field(default_factory=set)
    """Digests of the questions, white space squeezed."""
    pairs: set[bytes] = field(default_factory=set)
    """Digests of question and reference."""

    def adds(self, task: Task, row: int, defects: Defects) -> bool:
        """Returns False, and counts it, where question and reference occurred before."""
        # After other turns the same question is another one.
        turns = [one["content"] for one in task.messages if one["role"] not in SYSTEM_ROLES]
        question = " ".join(" ".join(turns or [task.question]).split())
        # Digests, since the texts of a large file would not fit in memory.
        key = _digest(question)
        pair_key = _digest(question, *task.reference)
        # A repeated row would weigh twice in training and in results.
        is_new = pair_key not in self.pairs
        if not is_new:
            defects.add(_REPEATED, row)
        elif key in self.questions:
            defects.add(_OTHER_REFERENCE, row)
        self.questions.add(key)
        self.pairs.add(pair_key)
        return is_new


_NESTED = (
    "with a list or an object in column '{column}' where a text is expected (name the place of one"
    " within it, such as '{column}.0' of a list or '{column}.name' of an object)"
)
_NO_COLUMN = "without a column that the settings name"
_REPEATED = "with a question and reference that occurred before"
_OTHER_REFERENCE = "with a question that occurred before but another reference"


def _read_row(row: Row, name: str, settings: DatasetSettings, defects: _FileDefects) -> Task | None:
    """Returns the row as a task; None, after counting the defect, where it cannot be used."""
    wanted = (settings.question_column, settings.reference_column, settings.category_column)
    # A column that the settings leave empty counts as found, without a value.
    cells: list[Any] = []
    for column in wanted:
        found = find_value(row.values, [column]) if column else ("", None)
        if found is None:
            defects.add(_NO_COLUMN, row.number)
            # Kept for the error about a column that no row has, which says what there is instead.
            defects.columns |= dict(nested_columns(row.values)).keys()
            return None
        cells.append(found[1])
    question, reference, category = cells
    messages: tuple[dict[str, Any], ...] = ()
    if are_messages(question):
        try:
            messages = read_messages(question)
        except ValueError as error:
            defects.add(f"with {error}", row.number)
            return None
        question = last_question(messages)
    for column, value in zip(wanted, (question, reference, category), strict=True):
        if is_nested(value, may_be_list=column == settings.reference_column):
            defects.add(_NESTED.format(column=column), row.number)
            return None
    if question is None or not str(question).strip():
        defects.add("without a question", row.number)
        return None
    accepted = accepted_answers(reference)
    # A row without the mark has no answer in the promised place; the whole text would be graded.
    if accepted and (mark := settings.reference_after) is not None:
        accepted = after_mark([one for one in accepted if mark in one], mark)
        if not accepted:
            defects.add("without the mark of tasks.dataset.reference_after", row.number)
            return None
    if not accepted and settings.reference_column:
        defects.add("without a reference", row.number)
        return None
    return Task(
        id=f"{name}/{row.number}",
        question=str(question),
        reference=accepted,
        category="" if category is None else str(category),
        columns=dict(row.values),
        messages=messages,
    )


def _refuse_source(spec: str, defects: _FileDefects, settings: DatasetSettings) -> None:
    """Raises DataError for a source without a usable row, naming the likeliest reason."""
    # An empty file has no columns to compare either.
    if defects.num_rows == 0:
        raise DataError(
            f"'{spec}' has no rows; expected one question per row", code="no-rows-in-file"
        )
    for setting in ("question_column", "reference_column", "category_column"):
        column = getattr(settings, setting)
        # A column that some rows have is a defect of the others.
        if _NO_COLUMN in defects.rows and column and column not in defects.columns:
            raise DataError(
                f"'{spec}' has no column '{column}'"
                f" (tasks.dataset.{setting}).{nearest(column, defects.columns)} It has"
                f" {', '.join(sorted(defects.columns))}",
                code="column-missing",
            )
    found = "; ".join(defects.summary(spec)) or "every row repeats one of an earlier file"
    raise DataError(
        f"'{spec}' has no usable row among {defects.num_rows}: {found}", code="no-usable-row"
    )


def _digest(*texts: str) -> bytes:
    # JSON may hold lone surrogates, which UTF-8 refuses.
    return hashlib.blake2b(
        "\x1f".join(texts).encode("utf-8", "surrogatepass"), digest_size=16
    ).digest()
