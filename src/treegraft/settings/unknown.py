"""Unknown settings: those of a recipe, and what to write instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from treegraft.core.removed import instead
from treegraft.settings.config import known_settings, tables_and_settings
from treegraft.settings.names import find_answer, find_last_part

NEAR = 0.8
"""Share of equal letters (difflib) from which a name counts as misspelt; below it a hint would
point anywhere."""

COMMON = frozenset({"dir", "enabled", "kind", "name", "path"})
"""Names that any table could have; in the wrong table they do not hint at another one."""


def unknown_settings(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted name and the value of every setting that does not exist."""
    for key, value in data.items():
        found = None if "." in key else tables_and_settings().get(prefix + key)
        if found is None:
            yield from _leaves(prefix + key, value)
        elif found.table is not None and isinstance(value, Mapping):
            yield from unknown_settings(value, f"{prefix}{key}.")


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    # Down to the setting itself, as it was typed or as another framework names it.
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}", inner)
    else:
        yield name, value


def suggestion(name: str, value: Any = None) -> str:
    """Returns a sentence, with a space before it, on what to write instead of the unknown setting
    `name`; an empty string where nothing is near."""
    # Hydra's marks for settings that are added, forced or removed.
    name = name.lstrip("+~")
    # First: what was there once is never a misspelling.
    if gone := instead(name):
        return gone
    table, _, last = name.rpartition(".")
    same_last = [leaf for leaf in known_settings() if leaf.rpartition(".")[2] == last]
    # Where somebody looked for it, most likely.
    siblings = [leaf for leaf in known_settings() if table and leaf.startswith(f"{table}.")]
    # One letter off in the table's name; the setting's own name may be another framework's too.
    if close := _nearest(name, same_last if table else (), 0.92):
        return f" Did you mean '{close}'?"
    if answered := find_answer(name):
        framework, answer = answered
        return " " + answer.sentence(framework, _as_named(name, answer.trl, answer.verl), value)
    # Of a known table, a name that many tables have says nothing: model.name is not run.name.
    if last in COMMON and siblings:
        return f" `treegraft config {table}` lists the settings of [{table}]."
    # The right name in the wrong table, before a name that is merely spelt alike.
    if same_last:
        close = _nearest(name, same_last, 0.7)
        return f" Did you mean {' or '.join(map(repr, [close] if close else same_last))}?"
    if answered := find_last_part(name):
        framework, answer = answered
        return " " + answer.sentence(framework, last, value)
    # Of a name in a known table its neighbours come first.
    close = _nearest(name, siblings) or _nearest(name, tables_and_settings())
    if not close:
        by_last = {leaf.rpartition(".")[2]: leaf for leaf in reversed([*known_settings()])}
        close = by_last.get(_nearest(last, by_last), "")
    return f" Did you mean '{close}'?" if close else ""


def _nearest(name: str, known: Iterable[str], cutoff: float = NEAR) -> str:
    """The known name that is most like this one, "" if none is near."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=cutoff)), "")


def _as_named(name: str, trl: tuple[str, ...], verl: tuple[str, ...]) -> str:
    """The name as the framework has it: TRL's without the table that it was put into."""
    last = name.rpartition(".")[2]
    return last if last in trl and name not in verl else name
