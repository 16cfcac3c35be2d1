"""BabyAI in words: an agent in rooms of coloured things does what a sentence says.

    pip install 'treegraft[babyai]'
    treegraft train babyai --smoke

    question   babyai
               go to the green key ; see green key left 1 forward 2 wall forward 3
    act        forward   ->  see green key left 1 forward 1 wall forward 2
    act        left      ->  see green key right 1 forward 1 wall forward 4
    ...                  ->  see green key forward 1 success

Missions, moves and what is visible are those of the package `minigrid` (Chevalier-Boisvert et al.,
arXiv 1810.08272); the words are few, after Carta et al. (arXiv 2302.02662). The expert is the
package's bot, which sees what the agent sees.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from contextlib import redirect_stdout
from functools import lru_cache
from typing import Any

os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")  # before pygame is imported

import gymnasium
import minigrid  # noqa: F401 (it registers the levels)
from minigrid.utils.baby_ai_bot import BabyAIBot

from treegraft import SettingError, StepContent, Task, ToolError
from treegraft.parts import OpenTasks, ToolCall, errors, keyed

ACTIONS = ("left", "right", "forward", "pickup", "drop", "toggle")
"""The package's, in its order; its seventh, "done", does nothing in BabyAI."""
UNKNOWN = f"unknown action ; write one of {' '.join(ACTIONS)}"
SUCCESS = "success"
FAILURE = "failure"
NO_ACTIONS_LEFT = "no actions left"
DONE = "done"
"""The answer, which the reward takes no notice of."""
WORDS = f"""
a after and ahead ball behind box carry closed door drop forward front go goal in key lava left
locked next object of on open pick put right see the then to toggle turn up wall you your agent at
red green blue purple yellow grey {UNKNOWN} {SUCCESS} {FAILURE} {NO_ACTIONS_LEFT}
"""
PURPOSES = ("train", "eval", "warmup")
NUM_WORLDS = 2**29
NUM_WARMUP_WORLDS = 128
"""Worlds that a warm-up shows, again and again: to draw one takes milliseconds."""
LEVELS = {
    name.removeprefix("BabyAI-").rpartition("-v")[0]: name
    for name in sorted(gymnasium.registry)
    if name.startswith("BabyAI-")
}
"""By their names without prefix and version, those that the package has registered them by."""


def begun(level: str, world: int) -> Any:
    """Returns the package's own environment, reset with the seed `world`."""
    made = gymnasium.make(LEVELS[level], disable_env_checker=True).unwrapped
    with redirect_stdout(io.StringIO()):  # it prints which draws it has rejected
        made.reset(seed=world)
    return made


class BabyAI:
    """One world. Its public method `act` is the agent's tool."""

    capability = "fork"  # a branch goes on in a deep copy of the object
    is_blocking = False  # no method waits, so none needs a thread

    def reset(self, level: str, world: int) -> str:
        """Begins a world and returns what is to be done, with what is seen first."""
        self._world = begun(level, world)
        self.done = False
        self._reward = 0.0
        return f"{self._world.mission} ; {seen(self._world)}"

    def act(self, action: str) -> str:
        """Does one action: left and right turn, forward goes one square, pickup, drop, toggle (open
        or close what is ahead)."""
        action = action.strip().lower()
        if action not in ACTIONS:
            raise ToolError(UNKNOWN)
        _, reward, terminated, truncated, _ = self._world.step(ACTIONS.index(action))
        self.done = terminated or truncated
        if not self.done:
            return seen(self._world)
        # The package's own reward also falls with the number of actions.
        self._reward = float(reward > 0)
        end = NO_ACTIONS_LEFT if not terminated else SUCCESS if reward > 0 else FAILURE
        return f"{seen(self._world)} {end}"

    def get_reward(self) -> float:
        """Returns 1 for a mission that is done, else 0."""
        return self._reward


def seen(world: Any) -> str:
    """Returns what is carried, the things in sight, the nearest first, and the wall ahead, with
    their distances in steps."""
    grid, visible = world.gen_obs_grid()
    column = grid.width // 2
    row = grid.height - 1  # the agent's
    words = ["see"]
    if world.carrying is not None:
        words.append(f"carry {name_of(world.carrying)}")
    things = []
    for i in range(grid.width):
        for j in range(grid.height):
            thing = grid.get(i, j)
            if (
                thing is None
                or thing.type == "wall"
                or not visible[i, j]
                or (i, j) == (column, row)
            ):
                continue
            aside = i - column
            ahead = row - j
            place = [("left", -aside), ("right", aside), ("forward", ahead)]
            way = " ".join(f"{name} {steps}" for name, steps in place if steps > 0)
            things.append((abs(aside) + ahead, aside, f"{name_of(thing)} {way}"))
    words += [text for _, _, text in sorted(things)]
    for steps in range(1, row + 1):
        if not visible[column, row - steps]:
            break
        thing = grid.get(column, row - steps)
        if thing is not None and thing.type == "wall":
            words.append(f"wall forward {steps}")
            break
    return " ".join(words)


def name_of(thing: Any) -> str:
    """Returns what a thing is called, a door with its state."""
    name = f"{thing.color} {thing.type}"
    if thing.type != "door":
        return name
    state = "open" if thing.is_open else "locked" if thing.is_locked else "closed"
    return f"{state} {name}"


@lru_cache(4096)
def bot_actions(level: str, world: int) -> tuple[str, ...] | None:
    """Returns the actions by which the package's bot does a mission; None if it gives up, or does
    something that agents cannot do here."""
    made: Any = BabyAIBot  # published without types
    played = begun(level, world)
    bot = made(played)
    action = None
    actions = []
    while True:
        try:
            action = bot.replan(action)
        except AssertionError:  # its ways of giving up
            return None
        if int(action) >= len(ACTIONS):
            return None
        actions.append(ACTIONS[int(action)])
        _, reward, terminated, truncated, _ = played.step(action)
        if terminated or truncated:
            return tuple(actions) if reward > 0 else None


class BabyAITasks(OpenTasks):
    """Worlds in equal shares by their level, each a level and a seed."""

    def __init__(
        self,
        *,
        seed: int,
        num_train: int,
        num_eval: int,
        levels: Sequence[str] = ("GoToObjS6", "GoToRedBallGrey", "GoToLocalS6N3", "PickupLoc"),
    ) -> None:
        """Raises `SettingError` for an unknown level."""
        for level in levels:
            if level not in LEVELS:
                raise SettingError(
                    f"tasks.options: levels: got '{level}', expected names such as GoToLocalS6N3 of"
                    f" the package minigrid.{errors.nearest(level, LEVELS)}"
                )
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
        drawn = keyed.keyed_int("babyai", self._seed, purpose, number) % NUM_WORLDS
        # The remainder is the purpose, so that no world serves two.
        world = drawn * len(PURPOSES) + PURPOSES.index(purpose)
        return Task(
            id=f"babyai/{purpose}/{number}",
            question="babyai",  # the mission comes with the first observation
            reference=(),  # the environment gives the reward
            category=level,
            columns={"level": level, "world": world},
        )

    def expert(self, task: Task, seed: int) -> tuple[StepContent, ...] | None:
        actions = bot_actions(**task.columns)
        if actions is None:
            return None
        steps = [StepContent(calls=(ToolCall("act", action),)) for action in actions]
        return (*steps, StepContent(answer=DONE))

    def early_answer(self, task: Task, steps: Sequence[StepContent]) -> str:
        """Returns that it is done, which it is not; a warm-up may teach this."""
        return DONE

    def vocabulary(self) -> Sequence[str]:
        """Returns every word that the tiny model can read and write."""
        numbers = [str(number) for number in range(1, 25)]
        return [*dict.fromkeys([*WORDS.split(), *numbers]), "babyai", DONE]
