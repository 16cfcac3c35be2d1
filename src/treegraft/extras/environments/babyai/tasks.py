"""Worlds of BabyAI by level and number, with the package's own bot as expert."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from treegraft.extras.environments.babyai.environment import (
    ACTIONS,
    FAILURE,
    NO_ACTIONS_LEFT,
    SUCCESS,
    UNKNOWN,
    begun,
)
from treegraft.extras.environments.babyai.plugin import BabyAISettings
from treegraft.extras.environments.drawn import DrawnTasks, require

_COLOURS: Final = "red green blue purple yellow grey"
_WORDS: Final = f"""
a after and ahead ball behind box carry closed door drop forward front go goal in key lava left
locked next object of on open pick put right see the then to toggle turn up wall you your agent at
{_COLOURS} {UNKNOWN} {SUCCESS} {FAILURE} {NO_ACTIONS_LEFT}
"""
_MAX_KEPT: Final = 4096


class BabyAITasks(DrawnTasks):
    """Worlds in equal shares by their level. Their environment is `environment.kind = "babyai"`."""

    family = "babyai"

    def question(self, level: str | int) -> str:
        """Returns the family's name: the mission comes with the first observation."""
        return self.family

    def solution(self, level: str | int, world: int) -> Sequence[str] | None:
        """Returns what the package's `BabyAIBot` does, which sees what the agent sees; None where
        it fails."""
        return bot_actions(str(level), world)

    def words(self) -> Sequence[str]:
        """Returns every word of missions, of what is seen, and of actions."""
        return (*dict.fromkeys([*_WORDS.split(), *map(str, range(1, 25))]),)


@lru_cache(_MAX_KEPT)
def bot_actions(level: str, world: int) -> tuple[str, ...] | None:
    """Returns the actions by which the package's bot does a mission; None where it gives up, or
    does something that agents cannot do here."""
    from minigrid.utils.baby_ai_bot import BabyAIBot

    made: Any = BabyAIBot
    played = begun(level, world)
    bot, last, actions = made(played), None, list[str]()
    while True:
        try:
            last = bot.replan(last)
        except AssertionError:  # its ways of giving up
            return None
        if int(last) >= len(ACTIONS):
            return None
        actions.append(ACTIONS[int(last)])
        _, reward, terminated, truncated, _ = played.step(last)
        if terminated or truncated:
            return tuple(actions) if reward > 0 else None


def babyai_tasks(settings: Any, seed: int) -> BabyAITasks:
    """Returns the worlds of a table [tasks]. Raises `SettingError` where the package is missing."""
    require("tasks.kind", "babyai", "minigrid")
    own: BabyAISettings = settings.babyai
    return BabyAITasks(
        own.levels, seed=seed, num_train=settings.num_train, num_eval=settings.num_eval
    )
