"""Defects of data, and evaluation questions that stand in the training data, before either is used.

Questions are compared in three ways, each found apart: to the letter; without case, punctuation and
white space; and by the share of three-word sequences that they have in common (Jaccard).
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from treegraft import DataError
from treegraft.parts import errors, fields, readers

NEAR = 0.7
"""Share of word sequences from which two questions are near-duplicates."""
SHINGLE_WORDS = 3
LONG_REFERENCE_CHARS = 300
"""Longer references are hardly answers."""
MARKS = {"gsm8k": "####"}
"""By a file's name: the mark behind which its references stand."""

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


@dataclass(frozen=True, slots=True)
class Finding:
    """One kind of defect in one file: Finding(kind="blank reference", rows=[4012],
    example="...")"""

    kind: str
    rows: list[int]
    example: str = ""
    """Of the first row."""


@dataclass(frozen=True, slots=True)
class FileDefects:
    """The defects of one file."""

    source: str
    question_column: str
    reference_column: str
    num_rows: int
    findings: list[Finding]


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
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
        train: a file or "hub:NAME:CONFIG/SPLIT".
        evals: the same, any number of them.
        question: column of the question in `train`; None looks for a usual one. Evaluation files
            are always looked at so.
        near: share of three-word sequences in common from which questions are near-duplicates,
            0..1.

    Raises:
        DataError: a file that is missing, empty, or has no column of questions.
    """
    for name in (train, *evals):
        # Before the first is read, which can take minutes.
        readers.check_is_there(name)
    read = [_read(train, question, reference), *(_read(name, None, None) for name in evals)]
    index = _Index(read[0][1], near)
    return DataCheck(
        files=[defects for defects, _ in read],
        contamination=[
            Contamination(name, len(items), index.overlaps(items))
            for name, (_, items) in zip(evals, read[1:], strict=True)
        ],
    )


# ---------------------------------------------------------------------- defects


def _read(name: str, question: str | None, reference: str | None) -> tuple[FileDefects, list[Item]]:
    wanted = (
        [question] if question else fields.QUESTION_COLUMNS,
        [reference] if reference else fields.REFERENCE_COLUMNS,
    )
    found = fields.Defects()
    items = list[Item]()
    columns = set[str]()
    used = ["", ""]
    num_rows = 0
    for num_rows, row in enumerate(readers.read_rows(name, "train"), start=1):
        if isinstance(row, readers.BadRow):
            found.add("row that cannot be read", num_rows - 1, row.reason)
            continue
        columns |= set(row.values)
        for column, text in fields.control_places(row.values, ""):
            shown = fields.CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
            found.add(f"control character in '{column}'", row.number, shown)
        asked, accepted = (fields.find_value(row.values, names) for names in wanted)
        # The first row that has one names the column; later rows may have another.
        used = [
            old or (new[0] if new else "") for old, new in zip(used, (asked, accepted), strict=True)
        ]
        text = fields.question_text(asked[1]) if asked else ""
        answers = fields.accepted_answers(accepted[1]) if accepted else ()
        answers = fields.after_mark(answers, MARKS.get(Path(name).stem))
        if asked and fields.is_nested(asked[1]) and not fields.are_messages(asked[1]):
            found.add("question that is a list or an object", row.number, repr(asked[1]))
        elif not text.strip():
            found.add("blank question", row.number, repr(answers))
        if accepted and fields.is_nested(accepted[1], may_be_list=True):
            found.add("reference that is a list or an object", row.number, repr(accepted[1]))
        elif not answers:
            found.add("blank reference", row.number, text)
        for answer in answers:
            if odd := _odd(answer):
                found.add(f"odd reference ({odd})", row.number, answer)
        items.append(Item(row.number, text, answers))
    if not used[0]:
        near = errors.nearest(question, columns) if question else ""
        has = f"it has {', '.join(sorted(columns))}" if columns else "it has no row"
        raise DataError(
            f"'{name}' has no column {' or '.join(wanted[0])}; {has}. Name the question's with"
            f" tasks.dataset.question_column.{near}",
            code="column-missing",
        )
    if not used[1]:
        near = errors.nearest(reference, columns) if reference else ""
        advice = (
            f"the columns are {', '.join(sorted(columns))}; name that of the reference with"
            f" tasks.dataset.reference_column.{near}"
        )
        found.add(f"no reference in {' or '.join(wanted[1])}", 0, advice)
    _add_repeats(items, found)
    findings = [
        Finding(kind, rows, found.examples[kind][:200]) for kind, rows in found.rows.items()
    ]
    return FileDefects(name, used[0], used[1] or "none", num_rows, findings), items


def _odd(reference: str) -> str:
    """Returns the reason why a reference looks like a mistake; empty where it does not."""
    if reference.strip().lower() in _PLACEHOLDERS:
        return "a placeholder"
    if fields.CONTROL.search(reference):
        return "a control character"
    if _LIST.match(reference):
        return "a list written as text"
    if len(reference) > LONG_REFERENCE_CHARS:
        return f"longer than {LONG_REFERENCE_CHARS} characters"
    # Escaped braces are printed ones, which need no partner.
    bare = reference.replace("\\{", "").replace("\\}", "")
    return "braces that do not match" if bare.count("{") != bare.count("}") else ""


def _add_repeats(items: Sequence[Item], found: fields.Defects) -> None:
    first: dict[str, Item] = {}
    for item in items:
        key = normalised(item.question)
        # A blank question is a defect of its own.
        before = first.setdefault(key, item) if key else item
        if before is item:
            continue
        kind = "repeated question"
        answers = ""
        if set(map(normalised, before.reference)) != set(map(normalised, item.reference)):
            kind += " with another reference"
            answers = f"  ({before.reference} in row {before.row}, {item.reference} here)"
        found.add(kind, item.row, f"{item.question[:120]}{answers}")


# ---------------------------------------------------------------------- contamination


def words(text: str) -> list[str]:
    """Returns the words of a text in lower case, each Chinese or Japanese character one."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def normalised(text: str) -> str:
    """Returns a text without case, punctuation and spaces, but one between digits: "1 + 23" gives
    "1 23", and "1,000" gives "1000". Signs of numbers go as well."""
    whole = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    return re.sub(r"(?<!\d) | (?!\d)", "", " ".join(words(whole)))


def shingles(text: str) -> frozenset[str]:
    """Returns the sequences of three words; of a shorter text the whole."""
    parts = words(text)
    starts = range(max(len(parts) - SHINGLE_WORDS, 0) + 1) if parts else ()
    return frozenset(" ".join(parts[start : start + SHINGLE_WORDS]) for start in starts)


class _Index:
    """The training questions, to be searched."""

    def __init__(self, items: Sequence[Item], near: float) -> None:
        self._near = near
        self._exact: dict[str, Item] = {}
        self._normalised: dict[str, Item] = {}
        self._items: dict[int, tuple[Item, int]] = {}
        """By row: the question, and how many sequences it has."""
        self._rows: defaultdict[str, list[int]] = defaultdict(list)
        """The rows with a sequence."""
        for item in items:
            if not item.question.strip() or item.question in self._exact:
                continue
            self._exact[item.question] = item
            if self._normalised.setdefault(normalised(item.question), item) is item:
                parts = shingles(item.question)
                self._items[item.row] = (item, len(parts))
                for part in parts:
                    self._rows[part].append(item.row)

    def overlaps(self, items: Sequence[Item]) -> list[Overlap]:
        """Returns one overlap for each question that is found, with the most similar one."""
        found: list[Overlap] = []
        for item in items:
            if not item.question.strip():
                continue
            how, similarity, train = self._match(item.question)
            if train is not None and similarity >= self._near:
                questions = (item.question, train.question)
                found.append(Overlap(item.row, train.row, how, similarity, *questions))
        return found

    def _match(self, question: str) -> tuple[str, float, Item | None]:
        if question in self._exact:
            return "exact", 1.0, self._exact[question]
        if (key := normalised(question)) in self._normalised:
            return "normalised", 1.0, self._normalised[key]
        own = shingles(question)
        common: Counter[int] = Counter()
        for part in own:
            common.update(self._rows.get(part, ()))
        best: Item | None = None
        similarity = 0.0
        # In the order of rows, so that of equally similar ones the first is named.
        for row in sorted(common):
            item, size = self._items[row]
            share = common[row] / (len(own) + size - common[row])
            if share > similarity:
                best = item
                similarity = share
        return "near", similarity, best
