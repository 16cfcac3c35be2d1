"""Treasure Hunter of TextWorld: find a thing in a house, and do not take the other one.

Source: Côté et al. (arXiv 1806.11532), the package `textworld`. Worlds, quests, commands and what
they do are the package's. Its sentences are not shown, since they take an interpreter for each
world and many words; the facts of the place are told instead.

    question   textworld treasure hunter
               find passkey ; bar exits east north
    act        go north          ->  kitchen table with apple exits east south
    act        go east           ->  attic passkey exits west
    act        take passkey      ->  attic holding passkey exits west won
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from typing import Any, Final

from treegraft import ToolError
from treegraft.extras.environments.drawn import PURPOSES, require
from treegraft.parts import ClassEnvironments, EnvironmentSettings

INVALID: Final = "invalid command"
WON: Final = "won"
LOST: Final = "lost"
"""The reasons for an end, told with the last result."""
_MODES: Final = (("easy", 5, 1, 5), ("medium", 10, 2, 10))
"""Mode, rooms, and the shortest and the longest quest of each ten levels, as in the package."""
_STATES: Final = ("open", "closed", "locked")
_MAX_KEPT: Final = 512


@cache
def knowledge() -> Any:
    """Returns what the package knows of houses: rules and names. To read it takes a fifth of a
    second, so that it is not read for each world."""
    from textworld.challenges.tw_treasure_hunter import treasure_hunter
    from textworld.generator.data import KnowledgeBase

    return KnowledgeBase.load(treasure_hunter.KB_PATH)


def drawn(level: int, seed: int) -> Any:
    """Returns the game that the package's own `make` draws for a level. Raises the package's
    `QuestGenerationError` where a map has no quest of that length."""
    from textworld import GameOptions, GenerationWarning
    from textworld.challenges.tw_treasure_hunter import treasure_hunter

    mode, num_rooms, shortest, longest = _MODES[(level - 1) // 10]
    options = GameOptions()
    options.seeds, options.kb, options.nb_rooms = seed, knowledge(), num_rooms
    # Ten lengths at equal distances, rounded to even as numpy does.
    options.quest_length = round(shortest + (level - 1) % 10 * (longest - shortest) / 9)
    with warnings.catch_warnings():
        # It tells authors of grammars that two things needed an adjective.
        warnings.simplefilter("ignore", GenerationWarning)
        return treasure_hunter.make_game(mode, options)


@lru_cache(_MAX_KEPT)
def game_of(level: int, world: int) -> Any:
    """Returns the game of a world: of the seeds world, world + 3, ... the first that has one."""
    from textworld.generator import QuestGenerationError

    seed = world
    while True:
        try:
            return drawn(level, seed)
        except QuestGenerationError:
            seed += len(PURPOSES)


class TextWorld:
    """One game, as an environment (`core.interfaces.Environment`)."""

    capability = "fork"
    is_blocking = False
    tools = ("act",)

    def reset(self, level: int, world: int) -> str:
        """Begins a game and returns what is to be found, with what is seen first."""
        from textworld.generator.game import GameProgression

        self._game = game_of(level, world)
        self._progress = GameProgression(self._game, track_quests=True)
        self.done = False
        (held,) = self._game.quests[0].win_events[0].actions[-1].added
        self._look()
        return f"find {self._name(held.arguments[0])} ; {self._told()}"

    def act(self, command: str) -> str:
        """Does one command of the game, such as: go north, take OBJECT, take OBJECT from OBJECT,
        open OBJECT, unlock OBJECT with OBJECT, put OBJECT on OBJECT, drop OBJECT, look."""
        action = self._commands.get(" ".join(command.split()))
        if action is None:
            raise ToolError(INVALID, code="query-unknown")
        self._progress.update(action)
        self._look()
        self.done = self._progress.done
        if not self.done:
            return self._told()
        return f"{self._told()} {WON if self._progress.completed else LOST}"

    def fork(self) -> TextWorld:
        """Returns a further game in the same state."""
        copy = TextWorld()
        copy._game, copy._progress, copy.done = self._game, self._progress.copy(), self.done
        copy._commands = self._commands
        return copy

    def get_reward(self) -> float:
        """Returns 1 for a game that is won, else 0."""
        return float(self._progress.completed)

    def _name(self, variable: Any) -> str:
        return str(self._game.infos[str(variable.name)].name)

    def _look(self) -> None:
        """Keeps what can be done now, by its command; nothing of it changes in place."""
        names = {key: info.name for key, info in self._game.infos.items()}
        actions = sorted(self._progress.valid_actions, key=str)
        self._commands = {action.format_command(names): action for action in actions}

    def _told(self) -> str:
        """The room, what is in it, what is held, and the ways out."""
        facts = _Facts(self._progress.state.facts)
        (room,) = facts.places["P"]
        ways = [name.split()[1] for name in self._commands if name.startswith("go ")]
        held = [self._name(thing) for thing in facts.inside("I")]
        told = [self._name(room), *self._things(facts, str(room.name))]
        told += ["holding", *held] if held else []
        return " ".join([*told, "exits", *sorted(ways)])

    def _things(self, facts: _Facts, place: str) -> Iterator[str]:
        """Each thing at a place with its state, and what lies on it or, if it is open, in it."""
        for thing in facts.inside(place):
            key = str(thing.name)
            state = facts.states.get(key, "")
            yield f"{state} {self._name(thing)}".strip()
            if state in ("", "open") and (contents := list(self._things(facts, key))):
                yield f"with {' with '.join(contents)}"


class _Facts:
    """What is true of a world, by where things are."""

    def __init__(self, facts: Iterable[Any]) -> None:
        self.places: dict[str, list[Any]] = {"P": []}
        """Of the player "P" the room, of each other key what is there, doors included."""
        self.states: dict[str, str] = {}
        for fact in sorted(facts, key=str):
            name, things = str(fact.name), fact.arguments
            if name == "at" and things[0].name == "P":
                self.places["P"].append(things[1])
            elif name in ("at", "on", "in"):
                self.places.setdefault(str(things[1].name), []).append(things[0])
            elif name == "link":
                self.places.setdefault(str(things[0].name), []).append(things[1])
            elif name in _STATES:
                self.states[str(things[0].name)] = name

    def inside(self, place: str) -> list[Any]:
        """Returns what is at, on or in a place."""
        return self.places.get(place, [])


def textworld_environments(settings: EnvironmentSettings) -> ClassEnvironments:
    """Returns the environments of `environment.kind = "textworld"`. Raises `SettingError` where the
    package is missing."""
    require("environment.kind", "textworld", "textworld")
    made: type[Any] = TextWorld
    return ClassEnvironments(made, settings.kind, settings)
