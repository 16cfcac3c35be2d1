"""Common settings of TRL and verl by their names there, each with what it is here."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files

FRAMEWORKS = {"trl": "TRL", "verl": "verl"}


@dataclass(frozen=True, slots=True)
class Answer:
    """What some settings of other frameworks are here."""

    here: tuple[str, ...] = ()
    """Dotted names; those of one table are meant together, those of several are alternatives."""
    note: str = ""
    """How the meaning differs; what to do where `here` is empty."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Their values, each with what to write here."""
    trl: tuple[str, ...] = ()
    verl: tuple[str, ...] = ()
    """Dotted names; "x.*" stands for all below x that no longer name covers."""

    @property
    def ours(self) -> str:
        """The settings here: "loss.clip_low and loss.clip_high", or ""."""
        is_one_table = len({name.rpartition(".")[0] for name in self.here}) == 1
        return (" and " if is_one_table else " or ").join(self.here)

    def sentence(self, framework: str, name: str, value: object = None) -> str:
        """Returns what to do instead of giving `name` this value."""
        text = f"{framework}'s '{name}' has no counterpart here."
        if self.here:
            text = f"{framework}'s '{name}' is {self.ours} here."
        if isinstance(value, str | bool) and str(value) in self.values:
            text += f" Instead of {value!r}: {self.values[str(value)]}."
        return f"{text} {self.note}".rstrip()


@functools.cache
def answers() -> tuple[Answer, ...]:
    """Returns the answers of the package, in the order of its file."""
    path = files("treegraft.settings") / "names.toml"
    return answers_of(path.read_text(encoding="utf-8"))


def answers_of(text: str) -> tuple[Answer, ...]:
    """Returns the answers of a file such as names.toml, in its order."""
    found: list[Answer] = []
    for entry in tomllib.loads(text)["answer"]:
        # Hashable: caches and tests compare answers.
        lists = {key: tuple(entry[key]) for key in ("here", "trl", "verl") if key in entry}
        found.append(Answer(**(entry | lists)))
    return tuple(found)


@functools.cache
def _by_name() -> Mapping[str, tuple[str, Answer]]:
    """Every name of theirs with its framework; TRL's first, since it has no tables."""
    found: dict[str, tuple[str, Answer]] = {}
    for key, framework in FRAMEWORKS.items():
        for answer in answers():
            for name in getattr(answer, key):
                found.setdefault(name, (framework, answer))
    return found


@functools.cache
def _by_last_part() -> Mapping[str, tuple[str, Answer]]:
    """verl's names without their tables, where that leaves no doubt."""
    found: dict[str, list[Answer]] = {}
    for answer in answers():
        for last in {name.rpartition(".")[2] for name in answer.verl} - {"*"}:
            found.setdefault(last, []).append(answer)
    return {last: ("verl", same[0]) for last, same in found.items() if len(same) == 1}


def find_answer(name: str) -> tuple[str, Answer] | None:
    """Returns the framework and the answer for a dotted name as it was written there: whole, below
    a table of verl's, or as TRL's in any table. None where no framework has it."""
    known = _by_name()
    if name in known:
        return known[name]
    table = name
    while table:
        table = table.rpartition(".")[0]
        if f"{table}.*" in known:
            return known[f"{table}.*"]
    return known.get(name.rpartition(".")[2])


def find_last_part(name: str) -> tuple[str, Answer] | None:
    """Returns the same for the last part of a dotted name, where one setting of verl has it."""
    return _by_last_part().get(name.rpartition(".")[2])


def find_value(setting: str, value: str) -> str:
    """Returns a sentence where `value` is what another framework calls a value of our `setting`,
    otherwise an empty string."""
    for answer in answers():
        if setting in answer.here and value in answer.values:
            return f" Instead of '{value}': {answer.values[value]}."
    return ""
