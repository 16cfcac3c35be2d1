"""Defects of data, and evaluation questions that stand in the training data, before either is used.

Questions are compared in three ways, each found apart: to the letter; without case, punctuation and
white space; and by the share of three-word sequences they have in common (Jaccard), candidates by
MinHash (Broder, 1997), each then counted exactly.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from treegraft.core.errors import DataError, nearest
from treegraft.evals.suites import SETS, SetRule
from treegraft.tasks.fields import (
    CONTROL,
    QUESTION_COLUMNS,
    REFERENCE_COLUMNS,
    Defects,
    accepted_answers,
    after_mark,
    control_places,
    find_value,
    nested_columns,
    question_text,
)
from treegraft.tasks.readers import BadRow, check_is_there, read_rows

NEAR = 0.7
"""Share of word sequences from which two questions are near-duplicates."""
SHINGLE_WORDS = 3
NUM_PERMUTATIONS = 128
LONG_REFERENCE_CHARS = 300
"""Longer references are hardly answers."""

_PLACEHOLDERS = frozenset(
    {"none", "null", "nan", "n/a", "na", "unknown", "todo", "?", "-", "[]", "{}"}
)
_LIST = re.compile(r"^\s*\[\s*['\"].*['\"]\s*\]\s*$", re.DOTALL)
_WORD = re.compile(
    r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]|[^\W_\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]+",
    re.UNICODE,
)


@dataclass(frozen=True, slots=True)
class Item:
    """A question of a file: Item(row=17, question="...", reference=("204",))"""

    row: int
    """From 0."""
    question: str
    reference: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One kind of defect in one file: Finding(kind="blank reference", rows=[4012],
    example="...")"""

    kind: str
    rows: list[int]
    example: str = ""
    """Of the first row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDefects:
    """The defects of one file."""

    source: str
    question_column: str
    reference_column: str
    num_rows: int
    findings: list[Finding]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """A question of an evaluation file that stands in a training file."""

    eval_row: int
    train_row: int
    how: str
    """"exact", "normalised" or "near"."""
    similarity: float
    """Share of word sequences in common, 0..1."""
    question: str
    train_question: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Contamination:
    """One evaluation file against the training file."""

    source: str
    num_questions: int
    overlaps: list[Overlap]
    """One for each evaluation question found, with the most similar training question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataCheck:
    """The result of `treegraft data check`."""

    files: list[FileDefects]
    contamination: list[Contamination]

    @property
    def is_clean(self) -> bool:
        """Whether nothing was found."""
        return not any(one.findings for one in self.files) and not any(
            one.overlaps for one in self.contamination
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns plain JSON values."""
        return asdict(self) | {"is_clean": self.is_clean}


def check_data(
    train: str,
    evals: Sequence[str],
    *,
    question: str | None = None,
    reference: str | None = None,
    near: float = NEAR,
) -> DataCheck:
    """Returns the defects of every file, and which questions of the evaluation files stand in the
    training file.

    Args:
        train: a file or "hub:NAME:SPLIT".
        evals: the same, any number of them.
        question: column of the question in `train`; None looks for a usual one. Evaluation files
            are always looked at so.
        near: share of three-word sequences in common from which questions are near-duplicates,
            0..1.

    Raises:
        DataError: a file that is missing, empty, or has no column of questions.
    """
    for name in (train, *evals):
        check_is_there(name)
    read = [_read(train, question, reference), *(_read(name, None, None) for name in evals)]
    index = _Index(read[0][1], near)
    return DataCheck(
        files=[defects for defects, _ in read],
        contamination=[
            Contamination(source=name, num_questions=len(items), overlaps=index.overlaps(items))
            for name, (_, items) in zip(evals, read[1:], strict=True)
        ],
    )


def _columns(
    name: str, question: str | None = None, reference: str | None = None
) -> tuple[Sequence[str], Sequence[str], SetRule | None]:
    """Returns the columns where question and reference of a file are looked for, in order, and the
    rule of the set that it is named after."""
    rule = SETS.get(Path(name).stem)
    questions = (*(rule.question if rule else ()), *QUESTION_COLUMNS)
    references = (*(rule.reference if rule else ()), *REFERENCE_COLUMNS)
    return [question] if question else questions, [reference] if reference else references, rule


# ---------------------------------------------------------------------- defects


def _read(name: str, question: str | None, reference: str | None) -> tuple[FileDefects, list[Item]]:
    wanted, wanted_reference, rule = _columns(name, question, reference)
    found = Defects()
    items: list[Item] = []
    used = ["", ""]
    columns: set[str] = set()
    num_rows = 0
    for row in read_rows(name, "train"):
        num_rows += 1
        if isinstance(row, BadRow):
            found.add("row that cannot be read", num_rows - 1, row.reason)
            continue
        columns |= set(row.values)
        for column, text in control_places(row.values, ""):
            shown = CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
            found.add(f"control character in '{column}'", row.number, shown)
        asked, accepted = find_value(row.values, wanted), find_value(row.values, wanted_reference)
        used = [
            old or (new[0] if new else "") for old, new in zip(used, (asked, accepted), strict=True)
        ]
        text = question_text(asked[1]) if asked else ""
        answers = accepted_answers(accepted[1]) if accepted else ()
        answers = after_mark(answers, rule.after if rule else None)
        if not text.strip():
            found.add("blank question", row.number, repr(answers))
        if not answers:
            found.add("blank reference", row.number, text)
        for answer in answers:
            if odd := _odd(answer):
                found.add(f"odd reference ({odd})", row.number, answer)
        items.append(Item(row.number, text, answers))
    if not used[0]:
        near = nearest(question, columns) if question else ""
        has = f"it has {', '.join(sorted(columns))}" if columns else "it has no row"
        raise DataError(
            f"'{name}' has no column {' or '.join(wanted)}; {has}. Name the question's with"
            f" --question-column.{near}"
        )
    _add_repeats(items, found)
    return FileDefects(
        source=name,
        question_column=used[0],
        reference_column=used[1] or "none",
        num_rows=num_rows,
        findings=[
            Finding(kind=kind, rows=rows, example=found.examples[kind][:200])
            for kind, rows in found.rows.items()
        ],
    ), items


def _odd(reference: str) -> str:
    """Returns the reason why a reference looks like a mistake; empty where it does not."""
    if reference.strip().lower() in _PLACEHOLDERS:
        return "a placeholder"
    if CONTROL.search(reference):
        return "a control character"
    if _LIST.match(reference):
        return "a list written as text"
    if len(reference) > LONG_REFERENCE_CHARS:
        return f"longer than {LONG_REFERENCE_CHARS} characters"
    bare = reference.replace("\\{", "").replace("\\}", "")
    return "braces that do not match" if bare.count("{") != bare.count("}") else ""


def _add_repeats(items: Sequence[Item], found: Defects) -> None:
    first: dict[str, Item] = {}
    for item in items:
        key = normalised(item.question)
        if not key:
            continue
        before = first.setdefault(key, item)
        if before is item:
            continue
        same = {normalised(one) for one in before.reference} == {
            normalised(one) for one in item.reference
        }
        kind = "repeated question" if same else "repeated question with another reference"
        answers = (
            "" if same else f"  ({before.reference} in row {before.row}, {item.reference} here)"
        )
        found.add(kind, item.row, f"{item.question[:120]}{answers}")


# ---------------------------------------------------------------------- contamination


def words(text: str) -> list[str]:
    """Returns the words of a text in lower case, each Chinese or Japanese character one."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def normalised(text: str) -> str:
    """Returns a text without case, punctuation and spaces; signs and points of numbers go as
    well."""
    return "".join(words(text))


def shingles(text: str) -> frozenset[str]:
    """Returns the sequences of three words; of a shorter text the whole."""
    parts = words(text)
    if len(parts) < SHINGLE_WORDS:
        return frozenset([" ".join(parts)]) if parts else frozenset()
    return frozenset(
        " ".join(parts[n : n + SHINGLE_WORDS]) for n in range(len(parts) - SHINGLE_WORDS + 1)
    )


def jaccard(one: frozenset[str], other: frozenset[str]) -> float:
    """Returns |A and B| / |A or B|; 0 for two empty sets."""
    union = len(one | other)
    return len(one & other) / union if union else 0.0


class _Index:
    """The training questions, to be searched."""

    def __init__(self, items: Sequence[Item], near: float) -> None:
        from datasketch import MinHashLSH

        self._near = near
        self._exact: dict[str, Item] = {}
        self._normalised: dict[str, Item] = {}
        self._items: dict[int, Item] = {}
        # Candidates are searched somewhat below the bound: MinHash estimates, and the exact count
        # decides.
        self._lsh = MinHashLSH(threshold=max(0.1, near - 0.15), num_perm=NUM_PERMUTATIONS)
        for item in items:
            if not item.question.strip() or item.question in self._exact:
                continue
            self._exact[item.question] = item
            if self._normalised.setdefault(normalised(item.question), item) is item:
                self._items[item.row] = item
                self._lsh.insert(item.row, _min_hash(shingles(item.question)))

    def overlaps(self, items: Sequence[Item]) -> list[Overlap]:
        """Returns one overlap for each question that is found."""
        return [
            overlap
            for item in items
            if item.question.strip() and (overlap := self._overlap(item)) is not None
        ]

    def _overlap(self, item: Item) -> Overlap | None:
        train: Item | None
        similarity = 1.0
        if (train := self._exact.get(item.question)) is not None:
            how = "exact"
        elif (train := self._normalised.get(normalised(item.question))) is not None:
            how = "normalised"
        else:
            how, own = "near", shingles(item.question)
            candidates = [self._items[row] for row in sorted(self._lsh.query(_min_hash(own)))]
            scored = [(jaccard(own, shingles(one.question)), one) for one in candidates]
            similarity, train = max(scored, key=lambda pair: pair[0], default=(0.0, None))
            if train is None or similarity < self._near:
                return None
        return Overlap(
            eval_row=item.row,
            train_row=train.row,
            how=how,
            similarity=similarity,
            question=item.question,
            train_question=train.question,
        )


def _min_hash(parts: frozenset[str]) -> Any:
    from datasketch import MinHash

    made = MinHash(num_perm=NUM_PERMUTATIONS)
    made.update_batch([part.encode("utf-8", "surrogatepass") for part in parts])
    return made


# ---------------------------------------------------------------------- looking at rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnSummary:
    """One column: its kinds of value, how often it is filled, and how long it is as text, in
    characters."""

    name: str
    kinds: list[str]
    num_filled: int
    length_median: int
    length_p95: int
    length_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileView:
    """Columns, lengths and a few rows of a file."""

    source: str
    num_rows: int
    question_column: str | None
    reference_column: str | None
    columns: list[ColumnSummary]
    rows: list[dict[str, Any]]
    """The rows asked for, {"row": number, "values": columns}."""
    problems: list[str]


def view_file(name: str, *, first: int = 0, num: int = 3) -> FileView:
    """Returns the columns of a file with their lengths, and `num` rows from row `first` on.

    Raises:
        DataError: a file that is missing or has no row.
    """
    lengths: dict[str, list[int]] = {}
    kinds: dict[str, dict[str, None]] = {}
    shown: list[dict[str, Any]] = []
    problems: list[str] = []
    used: list[str | None] = [None, None]
    num_rows = 0
    for row in read_rows(name, "train"):
        num_rows += 1
        if isinstance(row, BadRow):
            problems.append(row.reason)
            continue
        for column, value in nested_columns(row.values):
            if isinstance(value, Mapping):
                continue
            kind = type(value).__name__
            kinds.setdefault(column, {})[_KINDS.get(kind, kind)] = None
            filled = lengths.setdefault(column, [])
            if value not in (None, "", [], ()):
                filled.append(len(str(value)))
        for place, names in enumerate(_columns(name)[:2]):
            if used[place] is None and (found := find_value(row.values, names)):
                used[place] = found[0]
        if first <= row.number < first + num:
            shown.append({"row": row.number, "values": dict(row.values)})
    if not num_rows:
        raise DataError(f"'{name}' has no rows; expected one object a line.")
    return FileView(
        source=name,
        num_rows=num_rows,
        question_column=used[0],
        reference_column=used[1],
        columns=[
            _summary(column, list(kinds[column]), sorted(lengths[column])) for column in kinds
        ],
        rows=shown,
        problems=problems,
    )


_KINDS = {"str": "text", "NoneType": "nothing", "bool": "truth value"}
_KINDS |= {"int": "integer", "float": "number"}


def _summary(name: str, kinds: list[str], lengths: list[int]) -> ColumnSummary:
    median, p95, longest = (
        lengths[min(len(lengths) - 1, int(share * len(lengths)))] if lengths else 0
        for share in (0.5, 0.95, 1.0)
    )
    return ColumnSummary(
        name=name,
        kinds=kinds,
        num_filled=len(lengths),
        length_median=median,
        length_p95=p95,
        length_max=longest,
    )
