"""TextWorld's Treasure Hunter: find a thing in a house of five rooms, and leave the other one.

    pip install 'treegraft[textworld]'
    treegraft train textworld --smoke

    question   textworld treasure hunter
               find passkey ; bar exits east north
    act        go north          ->  kitchen apple exits east south
    act        go east           ->  attic passkey exits west
    act        take passkey      ->  attic holding passkey exits west won

Worlds, quests, commands and what they do are those of the package `textworld` (Côté et al., arXiv
1806.11532). Its sentences are not shown, since they need an interpreter for each world and many
words; the agent reads the facts of its room instead. The expert is the package's walkthrough, which
knows the whole house.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

from textworld import GameOptions, GenerationWarning
from textworld.challenges.tw_treasure_hunter import treasure_hunter
from textworld.generator import QuestGenerationError
from textworld.generator.data import KnowledgeBase
from textworld.generator.game import GameProgression
from textworld.generator.text_grammar import Grammar, GrammarOptions

from treegraft import SettingError, StepContent, Task, ToolError
from treegraft.parts import OpenTasks, ToolCall, keyed

INVALID = "invalid command"
WON = "won"
LOST = "lost"
QUESTION = "textworld treasure hunter"
DONE = "done"
"""The answer, which the reward takes no notice of."""
WORDS = f"""
find ; open closed locked with holding exits north south east west {INVALID} {WON} {LOST}
go take from put on into insert drop close unlock lock eat look inventory examine
"""
KINDS = ("r", "o", "k", "c", "s", "d", "f")
"""The package's: rooms, objects, keys, containers, supporters, doors, food."""
PLAYER = "P"
HANDS = "I"
"""The package's names for the player, and for where things are that the player holds."""
PURPOSES = ("train", "eval", "warmup")
NUM_WORLDS = 2**29
NUM_WARMUP_WORLDS = 128
"""Worlds that a warm-up shows, again and again: to draw one takes 25 to 200 ms."""


@cache
def knowledge() -> Any:
    """Returns what the package knows of houses: rules and names. Reading it takes a fifth of a
    second, so that it is not read for each world."""
    return KnowledgeBase.load(treasure_hunter.KB_PATH)


@lru_cache(512)
def game_of(level: int, world: int) -> Any:
    """Returns the game of a world: of the seeds world, world + 3, ... the first that has a quest of
    the level's length."""
    seed = world
    while True:
        options = GameOptions()
        options.seeds = seed
        options.kb = knowledge()
        options.nb_rooms = 5
        # As in the package: ten lengths from 1 to 5 at equal distances, rounded.
        options.quest_length = round(1 + (level - 1) * 4 / 9)
        try:
            with warnings.catch_warnings():
                # It tells authors of grammars that two things needed an adjective.
                warnings.simplefilter("ignore", GenerationWarning)
                return treasure_hunter.make_game("easy", options)
        except QuestGenerationError:
            seed += len(PURPOSES)  # of the same purpose


class TextWorld:
    """One game. Its public method `act` is the agent's tool."""

    capability = "fork"  # a branch goes on in a copy of the object
    is_blocking = False  # no method waits, so none needs a thread

    def reset(self, level: int, world: int) -> str:
        """Begins a game and returns what is to be found, with what is seen first."""
        self._game = game_of(level, world)
        self._progress = GameProgression(self._game, track_quests=True)
        self.done = False
        (wanted,) = self._game.quests[0].win_events[0].actions[-1].added
        return f"find {self._name(wanted.arguments[0])} ; {self._seen()}"

    def act(self, command: str) -> str:
        """Does one command of the game, such as: go north, take OBJECT, take OBJECT from OBJECT,
        open OBJECT, unlock OBJECT with OBJECT, put OBJECT on OBJECT, drop OBJECT, look."""
        action = self._commands().get(" ".join(command.split()))
        if action is None:
            raise ToolError(INVALID)
        self._progress.update(action)
        self.done = self._progress.done
        if not self.done:
            return self._seen()
        return f"{self._seen()} {WON if self._progress.completed else LOST}"

    def fork(self) -> TextWorld:
        """Returns a further game in the same state. A deep copy would copy the house, too."""
        copy = TextWorld()
        copy._game, copy._progress, copy.done = self._game, self._progress.copy(), self.done
        return copy

    def get_reward(self) -> float:
        """Returns 1 for a game that is won, else 0."""
        return float(self._progress.completed)

    def _name(self, variable: Any) -> str:
        return str(self._game.infos[str(variable.name)].name)

    def _commands(self) -> dict[str, Any]:
        """What can be done now, by its command."""
        names = {key: info.name for key, info in self._game.infos.items()}
        actions = sorted(self._progress.valid_actions, key=str)
        return {action.format_command(names): action for action in actions}

    def _seen(self) -> str:
        """The room, what is in it, what is held, and the ways out."""
        inside: dict[str, list[str]] = {}
        for fact in sorted(self._progress.state.facts, key=str):
            if fact.name in ("at", "in"):
                thing, place = fact.arguments
                if thing.name == PLAYER:
                    room = place
                else:
                    inside.setdefault(place.name, []).append(self._name(thing))
        words = [self._name(room), *inside.get(room.name, ())]
        if HANDS in inside:
            words += ["holding", *inside[HANDS]]
        ways = [command.split()[1] for command in self._commands() if command.startswith("go ")]
        return " ".join([*words, "exits", *sorted(ways)])


class TextWorldTasks(OpenTasks):
    """Worlds in equal shares by their level, each a level and a seed."""

    def __init__(
        self, *, seed: int, num_train: int, num_eval: int, levels: Sequence[int] = (1, 3, 5, 7)
    ) -> None:
        """Args:
        levels: of the package's easy ones, 1 to 10, with quests of 1 to 5 commands.
        """
        if not all(level in range(1, 11) for level in levels):
            raise SettingError(f"tasks.options: levels: got {levels}, expected numbers of 1 to 10.")
        self._seed = seed
        self._num_train = num_train
        self._num_eval = num_eval
        self._levels = levels

    def train_tasks(self) -> Sequence[Task]:
        return [self._task("train", number) for number in range(self._num_train)]

    def eval_tasks(self) -> Sequence[Task]:
        return [self._task("eval", number) for number in range(self._num_eval)]

    def warmup_tasks(self, num: int, seed: int) -> Sequence[Task]:
        numbers = [keyed.keyed_int("drawn", seed, n) % NUM_WARMUP_WORLDS for n in range(num)]
        return [self._task("warmup", number) for number in numbers]

    def _task(self, purpose: str, number: int) -> Task:
        level = self._levels[number % len(self._levels)]
        drawn = keyed.keyed_int("textworld", self._seed, purpose, number) % NUM_WORLDS
        # The remainder is the purpose, so that no world serves two.
        world = drawn * len(PURPOSES) + PURPOSES.index(purpose)
        return Task(
            id=f"textworld/{purpose}/{number}",
            question=QUESTION,  # what is to be found comes with the first observation
            reference=(),  # the environment gives the reward
            category=f"level {level}",
            columns={"level": level, "world": world},
        )

    def expert(self, task: Task, seed: int) -> tuple[StepContent, ...]:
        commands = game_of(**task.columns).walkthrough
        steps = [StepContent(calls=(ToolCall("act", str(command)),)) for command in commands]
        return (*steps, StepContent(answer=DONE))

    def early_answer(self, task: Task, steps: Sequence[StepContent]) -> str:
        """Returns that it is done, which it is not; a warm-up may teach this."""
        return DONE

    def vocabulary(self) -> Sequence[str]:
        """Returns every word that the tiny model can read and write: the package's names, too."""
        grammar = Grammar(GrammarOptions(), kb=knowledge())
        names = []
        for kind in KINDS:
            names += grammar.get_all_names_for_type(kind, include_adj=True)
        words = [*WORDS.split(), *" ".join(sorted(names)).split()]
        return [*dict.fromkeys(words), *QUESTION.split(), DONE]
