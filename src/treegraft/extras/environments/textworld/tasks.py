"""Worlds of Treasure Hunter by level and number, with the package's walkthrough as expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from treegraft.extras.environments.drawn import DrawnTasks, require
from treegraft.extras.environments.textworld.environment import (
    INVALID,
    LOST,
    WON,
    game_of,
    knowledge,
)
from treegraft.extras.environments.textworld.plugin import TextWorldSettings

_KINDS: Final = ("r", "o", "k", "c", "s", "d", "f")
"""The package's: rooms, objects, keys, containers, supporters, doors, food."""
_WORDS: Final = f"""
find ; open closed locked with holding exits north south east west {INVALID} {WON} {LOST}
go take from put on into insert drop close unlock lock eat look inventory examine
"""


class TextWorldTasks(DrawnTasks):
    """Worlds in equal shares by their level. Their environment is `environment.kind =
    "textworld"`."""

    family = "textworld"

    def question(self, level: str | int) -> str:
        """Returns the game: what is to be found comes with the first observation."""
        return "textworld treasure hunter"

    def solution(self, level: str | int, world: int) -> Sequence[str]:
        """Returns the package's walkthrough, a shortest way, which knows the whole world."""
        return [str(command) for command in game_of(int(level), world).walkthrough]

    def words(self) -> Sequence[str]:
        """Returns the words of commands, and of all names that the package gives."""
        from textworld.generator.text_grammar import Grammar, GrammarOptions

        grammar = Grammar(GrammarOptions(), kb=knowledge())
        names = [
            name
            for kind in _KINDS
            for name in grammar.get_all_names_for_type(kind, include_adj=True)
        ]
        return (*dict.fromkeys([*_WORDS.split(), *" ".join(sorted(names)).split()]),)


def textworld_tasks(settings: Any, seed: int) -> TextWorldTasks:
    """Returns the worlds of a table [tasks]. Raises `SettingError` where the package is missing."""
    require("tasks.kind", "textworld", "textworld")
    own: TextWorldSettings = settings.textworld
    return TextWorldTasks(
        own.levels, seed=seed, num_train=settings.num_train, num_eval=settings.num_eval
    )
