"""ScienceWorld: experiments of a primary school in a house of ten rooms, played in words.

Source: Wang, Jansen, Côté, Ammanabrolu (arXiv 2203.07540); the package `scienceworld`, whose worlds
live in a Java process.

    act        teleport to outside     ->  You teleport to the outside.
    act        focus on giant tortoise ->  You focus on the giant tortoise. task completed [...]

A world cannot be copied, so a branch repeats its actions. Worlds draw from one generator of the
Java process; it is set before each action to a function of the game and the number of the action,
so that equal actions have equal results in every process and beside any other game.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from treegraft import SettingError, ToolError, ToolUnavailable
from treegraft.extras.environments.scienceworld.java import (
    JavaFault,
    Simulator,
    running,
    why_missing,
)
from treegraft.parts import ClassEnvironments, EnvironmentSettings, keyed

COMPLETED: Final = "task completed"
FAILED: Final = "task failed"
NO_ACTIONS_LEFT: Final = "no actions left"
"""The reasons for an end, told with the last result."""
LOOK: Final = "look around"
_MOVES: Final = ("go ", "teleport ")
_MAX_ACTION_CHARS: Final = 500


class Game(NamedTuple):
    """Game("find-animal", 0, "easy"): which world is begun."""

    name: str
    """Of one of the 30 tasks."""
    variation: int
    """Objects, places and rooms differ between variations."""
    simplifications: str
    """Names with commas between them; empty for none."""


class Splits(NamedTuple):
    """Numbers of variations, as the package parts them."""

    train: tuple[int, ...]
    dev: tuple[int, ...]
    test: tuple[int, ...]


class Played:
    """A game under way."""

    def __init__(self, game: Game) -> None:
        """Begins it. Raises `ToolUnavailable` where the Java process fails or has no such game."""
        self.game, self.num_actions, self.score = game, 0, 0.0
        self.end = ""
        """Why it is over; empty before that."""
        self._simulator: Simulator = running()
        self._world = self._simulator.take()
        with self._simulator.drawing(self._seed("world")):
            refusal = self._world.load(*game, False)
        if refusal:
            self.close()
            raise ToolUnavailable(
                f"ScienceWorld has no {game}: {refusal}", code="scienceworld-game-missing"
            )

    def begun(self) -> str:
        """Returns the task and what is seen first; takes no time in the world."""
        with self._simulator.drawing(self._seed("look")):
            return f"{self._world.getTaskDescription()}\n{self._world.freeActionLook()}"

    def act(self, action: str) -> str:
        """Returns what the world answers, an unknown action included.

        Raises:
            ToolError: the world has no answer to it.
            ToolUnavailable: the Java process failed.
        """
        words = " ".join(action.split())[:_MAX_ACTION_CHARS]
        self.num_actions += 1
        try:
            with self._simulator.drawing(self._seed(self.num_actions)):
                observation = str(self._world.step(words)).strip()
                self.score = round(100 * self._world.getScore()) / 100
                is_completed = bool(self._world.getCompleted())
        except JavaFault as error:
            raise ToolError("the world cannot do that", code="world-refuses") from error
        if self.score < 0:
            self.end = FAILED
        elif is_completed:
            self.end = COMPLETED
        return observation

    def splits(self) -> Splits:
        """Returns the variations of the game's task. Raises `ToolUnavailable` as `act`."""
        with self._simulator.drawing(0):
            world = self._world
            parts = (
                world.getVariationsTrain(),
                world.getVariationsDev(),
                world.getVariationsTest(),
            )
            return Splits(*(tuple(int(number) for number in one) for one in parts))

    def written_path(self) -> tuple[str, ...]:
        """Returns the package's own solution, which may go on after the end of the task. The world
        is spoilt by it. Raises `ToolUnavailable` as `act`."""
        with self._simulator.drawing(self._seed("gold")):
            self._world.load(*self.game, True)
            return tuple(str(action) for action in self._world.getGoldActionSequence())

    def close(self) -> None:
        """Lets another game have the world."""
        self._simulator.give_back(self._world)

    def _seed(self, moment: str | int) -> int:
        return keyed.keyed_int("scienceworld", *self.game, moment)


class ScienceWorld:
    """One game, as an environment (`core.interfaces.Environment`)."""

    capability = "replay"
    tools = ("act",)

    def __init__(self) -> None:
        self._played: Played | None = None
        self._max_actions = 0
        self.done = False

    def reset(self, game: str, variation: int, simplifications: str, max_actions: int) -> str:
        """Begins a game and returns the task with what is seen first."""
        self.close()
        self._max_actions = max_actions
        self._played = Played(Game(game, variation, simplifications))
        return self._played.begun()

    def act(self, action: str) -> str:
        """Does one action in the world, such as: look around, look at OBJECT, look in OBJECT, focus
        on OBJECT, teleport to PLACE, go to PLACE, open OBJECT, pick up OBJECT, move OBJECT to
        OBJECT, pour OBJECT in OBJECT, activate OBJECT, use OBJECT on OBJECT, connect OBJECT to
        OBJECT, read OBJECT, inventory, wait."""
        played = self._game()
        observation = played.act(action)
        if not played.end and played.num_actions >= self._max_actions:
            played.end = NO_ACTIONS_LEFT
        self.done = bool(played.end)
        return f"{observation}\n{played.end}" if self.done else observation

    def get_reward(self) -> float:
        """Returns the score of the state, 0 to 1 by the parts of the task that are done, -1 for a
        failed task."""
        return self._game().score

    def close(self) -> None:
        """Lets another game have the world."""
        if self._played is not None:
            self._played.close()
            self._played = None

    def _game(self) -> Played:
        if self._played is None:
            raise ToolError("no game has begun; reset() begins one", code="no-game")
        return self._played


def scienceworld_environments(settings: EnvironmentSettings) -> ClassEnvironments:
    """Returns the environments of `environment.kind = "scienceworld"`; nothing is started. Raises
    `SettingError` where the package or Java is missing."""
    require("environment.kind")
    made: type[Any] = ScienceWorld
    return ClassEnvironments(made, settings.kind, settings)


def require(place: str) -> None:
    """Raises `SettingError`, which names `place`, where the package or Java is missing."""
    if missing := why_missing():
        raise SettingError(
            f"{place}: ScienceWorld needs {missing}; run: pip install 'treegraft[environments]',"
            " and for Java, version 8 or newer, apt-get install default-jre-headless.",
            code="package-missing",
        )


def game_names() -> list[str]:
    """Returns the names of all tasks, in the order of the paper. Needs the package alone."""
    from scienceworld.constants import ID2TASK

    return list(ID2TASK.values())


def splits_of(name: str, simplifications: str) -> Splits:
    """Returns the variations of a task. Raises `ToolUnavailable` where the Java process fails."""
    with playing(Game(name, 0, simplifications)) as played:
        return played.splits()


def gold_path(game: Game) -> tuple[str, ...] | None:
    """Returns the actions of the package's own solution up to the end of the task, with a look
    around before it focuses on something in a room that it has not looked at; without these looks
    where they spoil it. None where the whole score is not reached.

    Raises:
        ToolUnavailable: the Java process failed.
    """
    with playing(game) as played:
        written = played.written_path()
    for actions in dict.fromkeys((with_looks(written), written)):
        if (number := _actions_to_the_end(game, actions)) is not None:
            return actions[:number]
    return None


def with_looks(actions: Sequence[str]) -> tuple[str, ...]:
    """Returns actions with "look around" before the first "focus on" in a room without a look."""
    found, has_looked = list[str](), False
    for action in actions:
        if action.startswith("focus on ") and not has_looked:
            found.append(LOOK)
            has_looked = True
        has_looked = action == LOOK or (has_looked and not action.startswith(_MOVES))
        found.append(action)
    return tuple(found)


def _actions_to_the_end(game: Game, actions: Sequence[str]) -> int | None:
    """How many of the actions complete the task; None where they do not."""
    with playing(game) as played:
        for number, action in enumerate(actions, start=1):
            played.act(action)
            if played.end:
                return number if played.score == 1.0 else None
    return None


@contextmanager
def playing(game: Game) -> Iterator[Played]:
    """Holds a game for the time of the block. Raises `ToolUnavailable` as `Played`."""
    played = Played(game)
    try:
        yield played
    finally:
        played.close()
