"""What is wrong with data, and what of an evaluation set stands in the training data, before either
is used.

Questions are compared in three ways, each found apart: to the letter; without case, punctuation and
white space; and by the share of three-word sequences they have in common (Jaccard), candidates by
MinHash (Broder, 1997), each then counted exactly.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from treegraft.core.errors import DataError, nearest
from treegraft.evals.fields import (
    CONTROL,
    QUESTION_COLUMNS,
    REFERENCE_COLUMNS,
    accepted_answers,
    control_places,
    find_value,
    question_text,
)
from treegraft.evals.suites import SETS
from treegraft.tasks.readers import BadRow, read_rows

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
class FileReport:
    """What was found in one file."""

    source: str
    question_column: str
    reference_column: str
    num_rows: int
    findings: list[Finding] = field(default_factory=list)


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
class DataReport:
    """All that `treegraft data check` found."""

    files: list[FileReport]
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
) -> DataReport:
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
    names = [train, *evals]
    for name in names:
        _refuse_missing(name)
    columns = [(question, reference), *((None, None) for _ in evals)]
    read = [_read(name, own, other) for name, (own, other) in zip(names, columns, strict=True)]
    index = _Index(read[0][1], near)
    return DataReport(
        files=[report for report, _ in read],
        contamination=[
            Contamination(source=name, num_questions=len(items), overlaps=index.overlaps(items))
            for name, (_, items) in zip(evals, read[1:], strict=True)
        ],
    )


def _refuse_missing(name: str) -> None:
    if not name.startswith("hub:") and "$" not in name and not Path(name).expanduser().is_file():
        raise DataError(
            f"there is no file '{name}'; expected a .jsonl, .json or .parquet file, or"
            " 'hub:NAME:SPLIT'."
        )


# ---------------------------------------------------------------------- defects


def _read(name: str, question: str | None, reference: str | None) -> tuple[FileReport, list[Item]]:
    rule = SETS.get(Path(name).stem)
    wanted = (question,) if question else (*(rule.question if rule else ()), *QUESTION_COLUMNS)
    wanted_reference = (
        (reference,) if reference else (*(rule.reference if rule else ()), *REFERENCE_COLUMNS)
    )
    found = _Findings()
    items: list[Item] = []
    used = ("", "")
    columns: set[str] = set()
    num_rows = 0
    for row in read_rows(name, "train"):
        num_rows += 1
        if isinstance(row, BadRow):
            found.add("row that cannot be read", num_rows - 1, row.reason)
            continue
        columns |= set(row.values)
        for column, text in control_places(row.values, ""):
            found.add(f"control character in '{column}'", row.number, _visible(text))
        asked, accepted = find_value(row.values, wanted), find_value(row.values, wanted_reference)
        used = (
            used[0] or (asked[0] if asked else ""),
            used[1] or (accepted[0] if accepted else ""),
        )
        text = question_text(asked[1]) if asked else ""
        answers = accepted_answers(accepted[1]) if accepted else ()
        if rule is not None and rule.after is not None:
            answers = tuple(answer.rpartition(rule.after)[2].strip() for answer in answers)
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
    _repeats(items, found)
    report = FileReport(
        source=name,
        question_column=used[0],
        reference_column=used[1] or "none",
        num_rows=num_rows,
        findings=found.listed(),
    )
    return report, items


class _Findings:
    """Findings by kind, in the order in which they first occur."""

    def __init__(self) -> None:
        self._rows: dict[str, list[int]] = {}
        self._examples: dict[str, str] = {}

    def add(self, kind: str, row: int, example: str) -> None:
        """Counts a row once per kind."""
        rows = self._rows.setdefault(kind, [])
        if not rows or rows[-1] != row:
            rows.append(row)
        self._examples.setdefault(kind, example)

    def listed(self) -> list[Finding]:
        return [
            Finding(kind=kind, rows=rows, example=self._examples[kind][:200])
            for kind, rows in self._rows.items()
        ]


def _odd(reference: str) -> str:
    """What makes a reference look like a mistake; empty for nothing."""
    if reference.strip().lower() in _PLACEHOLDERS:
        return "a placeholder"
    if CONTROL.search(reference):
        return "a control character"
    if _LIST.match(reference):
        return "a list written as text"
    if len(reference) > LONG_REFERENCE_CHARS:
        return f"longer than {LONG_REFERENCE_CHARS} characters"
    opened = (
        reference.count("{")
        - reference.count("}")
        - reference.count("\\{")
        + reference.count("\\}")
    )
    if opened:
        return "braces that do not match"
    return ""


def _repeats(items: Sequence[Item], found: _Findings) -> None:
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


def _visible(text: str) -> str:
    return CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


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
        exact = self._exact.get(item.question)
        if exact is not None:
            return _as_overlap(item, exact, "exact", 1.0)
        same = self._normalised.get(normalised(item.question))
        if same is not None:
            return _as_overlap(item, same, "normalised", 1.0)
        own = shingles(item.question)
        candidates = [self._items[row] for row in sorted(self._lsh.query(_min_hash(own)))]
        scored = [(jaccard(own, shingles(one.question)), one) for one in candidates]
        best = max(scored, key=lambda pair: pair[0], default=None)
        return (
            None
            if best is None or best[0] < self._near
            else _as_overlap(item, best[1], "near", best[0])
        )


def _as_overlap(item: Item, train: Item, how: str, similarity: float) -> Overlap:
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
class ColumnReport:
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
    """What a person looks at before using a file."""

    source: str
    num_rows: int
    question_column: str | None
    reference_column: str | None
    columns: list[ColumnReport]
    rows: list[dict[str, Any]]
    """The rows asked for, {"row": number, "values": columns}."""
    problems: list[str]


def view_file(name: str, *, first: int = 0, num: int = 3) -> FileView:
    """Returns the columns of a file with their lengths, and `num` rows from row `first` on.

    Raises:
        DataError: a file that is missing or has no row.
    """
    _refuse_missing(name)
    rule = SETS.get(Path(name).stem)
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
        for column, value in _leaves(row.values, ""):
            kinds.setdefault(column, {})[_kind(value)] = None
            filled = lengths.setdefault(column, [])
            if value not in (None, "", [], ()):
                filled.append(len(value if isinstance(value, str) else str(value)))
        wanted = (
            (*(rule.question if rule else ()), *QUESTION_COLUMNS),
            (*(rule.reference if rule else ()), *REFERENCE_COLUMNS),
        )
        for place, names in enumerate(wanted):
            if used[place] is None and (found := find_value(row.values, names)):
                used[place] = found[0]
        if first <= row.number < first + num:
            shown.append({"row": row.number, "values": dict(row.values)})
    if not num_rows:
        raise DataError(f"'{name}' has no rows; expected one object a line.")
    columns = [_column(column, list(kinds[column]), sorted(lengths[column])) for column in kinds]
    return FileView(
        source=name,
        num_rows=num_rows,
        question_column=used[0],
        reference_column=used[1],
        columns=columns,
        rows=shown,
        problems=problems,
    )


def _leaves(values: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        found += (
            _leaves(value, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else [(f"{prefix}{key}", value)]
        )
    return found


def _kind(value: Any) -> str:
    names = {
        "str": "text",
        "NoneType": "nothing",
        "bool": "truth value",
        "int": "integer",
        "float": "number",
    }
    return names.get(type(value).__name__, type(value).__name__)


def _column(name: str, kinds: list[str], lengths: list[int]) -> ColumnReport:
    def at(share: float) -> int:
        return lengths[min(len(lengths) - 1, int(share * len(lengths)))] if lengths else 0

    return ColumnReport(
        name=name,
        kinds=kinds,
        num_filled=len(lengths),
        length_median=at(0.5),
        length_p95=at(0.95),
        length_max=lengths[-1] if lengths else 0,
    )
