"""The papers' evaluation sets by name, in sets.toml, and how their rows are read."""

from __future__ import annotations

import base64
import binascii
import hashlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from treegraft import DataError, SettingError, Task
from treegraft.parts import errors, fields, keyed, measuring, readers

Measure = Literal["math", "f1", "judge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetRule:
    """How one set is read and measured.

    SetRule(measure="math", question=("question",), reference=("answer",), after="####",
    hub="hub:openai/gsm8k:main/test", num_scored=500)
    """

    measure: Measure
    """Main score: "math" equality, token "f1", or a language-model "judge" (without one: exact
    match or equal mathematics)."""
    question: tuple[str, ...] = ("question",)
    """Columns in order of preference, any case; dots go into nested columns."""
    reference: tuple[str, ...] = ("answer",)
    aliases: tuple[str, ...] = ()
    """Columns of further accepted answers."""
    after: str | None = None
    """Mark behind which a reference begins; None if the whole column is one."""
    boxed: tuple[str, ...] = ()
    """Columns whose last \\boxed{} is the reference, where none of `reference` is there."""
    level: tuple[str, ...] = ()
    """Columns that results are broken down by; empty for no break-down."""
    must_be_blank: tuple[str, ...] = ()
    """Columns of pictures and files: rows that have one there are left out, for the agent reads
    text alone."""
    canary: str | None = None
    """Column with the password of a row's question and reference, where they are encrypted; a row
    without it is read as it is."""
    hub: str | None = None
    """The set's name on the hub; None if no readable copy is there."""
    num_scored: int | None = None
    """Rows that the released evaluation of ARPO scores (the files of its evaluation/data, of each
    the first 500); None where it is not known."""


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
SETS: Mapping[str, SetRule] = TypeAdapter(dict[str, SetRule]).validate_python(_TABLES["sets"])
"""Every set by name."""


def _members(names: Sequence[str]) -> tuple[str, ...]:
    """The sets of these names, of which some are groups."""
    found: list[str] = []
    for name in names:
        found += [name] if name in SETS else _members(_TABLES["groups"][name])
    return tuple(found)


GROUPS: Mapping[str, tuple[str, ...]] = {
    name: _members(names) for name, names in _TABLES["groups"].items()
}
"""Several sets by one name."""


def _measures(paper: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, measure in _TABLES["measures"].get(paper, {}).items():
        found |= dict.fromkeys(_members([name]), measure)
    return found


MEASURES: Mapping[str, Mapping[str, str]] = {
    name: own for name in GROUPS if (own := _measures(name.partition("-")[0]))
}
"""The measures of a paper's groups, by set, if they differ from those of the sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    """A set that has been read.

    EvalSet(name="gsm8k", source="data/gsm8k.jsonl", rule=SETS["gsm8k"], tasks=(...), notes=())
    """

    name: str
    source: str
    rule: SetRule
    tasks: tuple[Task, ...]
    """Ids are "NAME/ROW", rows counted from 0."""
    notes: tuple[str, ...] = ()
    """Its defects and the rows left out, one sentence each."""
    num_rows: int = 0
    """Usable rows before the choice of `num`."""

    @property
    def digest(self) -> str:
        """Checksum of ids, questions, references and levels."""
        parts = (f"{t.id}\x1f{t.question}\x1f{t.reference}\x1f{t.category}" for t in self.tasks)
        return hashlib.sha256("\x1e".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def parse_names(text: str) -> dict[str, str | None]:
    """Returns set name -> its source (None for the usual one), from
    "gsm8k,web,math500=my.jsonl", each name once.

    Raises:
        SettingError: an unknown name, or an empty list.
    """
    chosen: dict[str, str | None] = {}
    for part in filter(None, (one.strip() for one in text.split(","))):
        name, has_source, source = part.partition("=")
        if name in GROUPS and not has_source:
            for member in GROUPS[name]:
                chosen.setdefault(member, None)
        elif name in SETS and (source or not has_source):
            # Named again without a file, a set stays with the file that it has.
            chosen[name] = source or chosen.get(name)
        else:
            raise SettingError(
                f"evaluation sets: got '{part}'; expected sets ({', '.join(SETS)}), groups"
                f" ({', '.join(GROUPS)}), or NAME=FILE to read a set from another"
                f" place.{errors.nearest(name, [*SETS, *GROUPS])}",
                code="unknown-set",
            )
    if not chosen:
        raise SettingError(
            "evaluation sets: got none; expected names with commas, such as gsm8k,hotpotqa or one"
            f" of {', '.join(GROUPS)}.",
            code="no-sets",
        )
    return chosen


def load_sets(
    names: Mapping[str, str | None],
    *,
    data_dir: Path | None = None,
    num: int | None = None,
    shuffle_seed: int | None = None,
    as_papers: bool = False,
) -> list[EvalSet]:
    """Returns the sets, read.

    Args:
        data_dir: a folder with NAME.jsonl, .json, .csv or .parquet for each set (or a folder
            NAME with test.*, as in ARPO's evaluation/data); None means the hub.
        num: rows of each set; None for all.
        shuffle_seed: take the first `num` of this seed's order; None for the order of the file.
        as_papers: note where a set is not the one that the released evaluation scores.

    Raises:
        SettingError: a set without a source.
        DataError: a source that is missing or has no usable row.
    """
    sources = {}
    # All are looked for before the first is read: a set can take minutes to fetch.
    for name, typed in names.items():
        sources[name] = typed or find_source(name, data_dir)
    found = []
    for name, source in sources.items():
        one = read_set(name, source, num=num, shuffle_seed=shuffle_seed)
        found.append(_compared_with_papers(one) if as_papers else one)
    return found


def _compared_with_papers(found: EvalSet) -> EvalSet:
    scored = found.rule.num_scored
    num = len(found.tasks)
    if scored is None or scored == num:
        return found
    note = (
        f"ARPO's released evaluation scores {scored} rows of it, and these are {num}: its numbers"
        " are of other questions"
    )
    return replace(found, notes=(*found.notes, note))


def find_source(name: str, data_dir: Path | None) -> str:
    """Returns the file or hub name of a set. Raises as `load_sets` does."""
    if data_dir is None:
        if (hub := SETS[name].hub) is None:
            raise SettingError(
                f"set '{name}': no readable copy lies on the hub; give a folder with --data-dir, or"
                f" {name}=FILE.",
                code="set-not-on-hub",
            )
        return hub
    if not data_dir.is_dir():
        raise DataError(
            f"--data-dir '{data_dir}': there is no such folder; expected one that holds"
            f" {name}.jsonl and the like.",
            code="set-folder-missing",
        )
    # Sorted for the message: the order of a folder is the file system's.
    held = sorted(
        one.name for one in data_dir.iterdir() if one.suffix in readers.FILE_TYPES or one.is_dir()
    )
    places = [data_dir / f"{name}{end}" for end in readers.FILE_TYPES]
    # ARPO's release has folders of other cases, and HLE in top.json.
    for one in held:
        if one.lower() == name:
            for stem in ("test", name, "top"):
                places += [data_dir / one / f"{stem}{end}" for end in readers.FILE_TYPES]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise DataError(
            f"--data-dir '{data_dir}': there is no {name}.jsonl, .json, .csv or .parquet, nor a"
            f" folder {name} with test.jsonl. It holds {', '.join(held) or 'no such file'}. Leave"
            f" '{name}' out, or name its file: {name}=FILE.",
            code="set-file-missing",
        )
    return str(found)


def read_set(
    name: str, source: str, *, num: int | None = None, shuffle_seed: int | None = None
) -> EvalSet:
    """Returns a set read from a file or the hub by the rule of its name.

    Raises:
        DataError: no usable row; or as `read_rows` does.
    """
    rule = SETS[name]
    defects = fields.Defects()
    columns = set[str]()
    tasks: list[Task] = []
    number = -1
    for number, row in enumerate(readers.read_rows(source, "test")):
        if isinstance(row, readers.BadRow):
            # Left out and counted: one bad row must not stop a set of thousands.
            defects.add("that cannot be read", number)
            continue
        columns |= set(row.values)
        found = _read(f"{name}/{row.number}", row.values, rule)
        if isinstance(found, str):
            defects.add(found, number)
        else:
            tasks.append(found)
    if not tasks:
        has = f" Its columns are {', '.join(sorted(columns))}." if columns else ""
        raise DataError(
            f"set '{name}': '{source}' has no usable row among {number + 1}"
            f" ({'; '.join(defects.sentences()) or 'it is empty'}). Expected a question in"
            f" {' or '.join(rule.question)} and a reference in"
            f" {' or '.join((*rule.reference, *rule.boxed))}.{has}",
            code="set-without-rows",
        )
    if shuffle_seed is not None:
        # By a key of each task alone, so that rows added to the file do not reorder the others.
        tasks.sort(key=lambda task: keyed.keyed_int(shuffle_seed, "eval-order", task.id))
    notes = defects.sentences()
    # Else a table of "500 items" might be one of fewer.
    if num is not None and num > len(tasks):
        notes.append(f"{len(tasks)} rows are all it has; {num} were asked for")
    return EvalSet(
        name=name,
        source=source,
        rule=rule,
        # After the sort, so that a shuffled choice is one of the whole set.
        tasks=tuple(tasks[:num]),
        notes=tuple(notes),
        num_rows=len(tasks),
    )


def _read(task_id: str, values: Mapping[str, Any], rule: SetRule) -> Task | str:
    """Returns the row as a task, or the reason why it is of no use."""
    for column in rule.must_be_blank:
        if (blank := fields.find_value(values, [column])) and str(blank[1] or "").strip():
            return "with a picture or file"
    if rule.canary and (password := fields.find_value(values, [rule.canary])) and password[1]:
        try:
            values = decrypted(values, (*rule.question, *rule.reference), str(password[1]))
        except ValueError:
            return "that cannot be decrypted"
    question = fields.find_value(values, rule.question)
    level = fields.find_value(values, rule.level)
    text = _question_text(question[1]) if question else ""
    if not text.strip():
        return "without a question"
    found = fields.find_value(values, rule.reference)
    # A copy of the set may hold the bare reference already.
    accepted = fields.after_mark(fields.accepted_answers(found[1]) if found else (), rule.after)
    if not accepted and (solution := fields.find_value(values, rule.boxed)):
        accepted = (measuring.boxed(str(solution[1])) or "",)
    for column in rule.aliases:
        if further := fields.find_value(values, [column]):
            accepted += fields.accepted_answers(further[1])
    reference = tuple(dict.fromkeys(filter(None, accepted)))
    if not reference:
        return "without a reference"
    # Levels may be numbers or names, as in MATH and GAIA.
    category = "" if level is None or level[1] is None else str(level[1]).strip()
    # A bare number would not tell what it counts in a table.
    if category.isdigit():
        category = f"level {category}"
    return Task(id=task_id, question=text, reference=reference, category=category)


def decrypted(values: Mapping[str, Any], columns: Sequence[str], password: str) -> dict[str, Any]:
    """Returns a row with these columns (any case) decrypted, as BrowseComp (arXiv 2504.12516)
    publishes them: base64 of the text's bytes, each combined by exclusive or with SHA-256 of the
    password, repeated.

    Raises:
        ValueError: a column is not base64, or not text under this password.
    """
    key = hashlib.sha256(password.encode()).digest()
    found = dict(values)
    for name, value in values.items():
        if name.lower() in columns and isinstance(value, str):
            try:
                data = base64.b64decode(value, validate=True)
            except binascii.Error as error:
                raise ValueError(f"{name} is not base64") from error
            clear = bytes(byte ^ key[place % len(key)] for place, byte in enumerate(data))
            found[name] = clear.decode("utf-8")
    return found


def _question_text(value: Any) -> str:
    """Returns a question as text: of chat messages the last one by the user; empty where it is
    another list or object, or messages that are not text."""
    if fields.are_messages(value):
        try:
            return fields.last_question(value)
        except ValueError:
            return ""
    return "" if value is None or fields.is_nested(value) else str(value)
