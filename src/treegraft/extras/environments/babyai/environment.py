"""BabyAI in words: an agent in rooms of coloured things does what a sentence says.

Source: Chevalier-Boisvert et al. (arXiv 1810.08272), in the package `minigrid`; what is seen is
told as in Carta et al. (arXiv 2302.02662), in fewer words.

    question   babyai
               go to the green key ; see green key left 1 forward 2 wall forward 3
    act        forward   ->  see green key left 1 forward 1 wall forward 2
    act        left      ->  see green key right 1 forward 1 wall forward 4
    ...                  ->  see green key forward 1 success
"""

from __future__ import annotations

import copy
import io
import os
from contextlib import redirect_stdout
from functools import cache
from typing import Any, Final

from treegraft import SettingError, ToolError
from treegraft.extras.environments.drawn import require
from treegraft.parts import ClassEnvironments, EnvironmentSettings, errors

ACTIONS: Final = ("left", "right", "forward", "pickup", "drop", "toggle")
"""The package's, in its order; its seventh, "done", does nothing in BabyAI."""
UNKNOWN: Final = f"unknown action ; write one of {' '.join(ACTIONS)}"
SUCCESS: Final = "success"
FAILURE: Final = "failure"
NO_ACTIONS_LEFT: Final = "no actions left"
"""The reasons for an end, told with the last result."""
_STATES: Final = ("open", "closed", "locked")
_PREFIX: Final = "BabyAI-"


@cache
def level_names() -> dict[str, str]:
    """Returns the names of all levels, without their prefix and version, and those that the package
    has registered them by, each in its newest version."""
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    import gymnasium
    import minigrid  # noqa: F401  (registers them)

    known = sorted(name for name in gymnasium.registry if name.startswith(_PREFIX))
    return {name.removeprefix(_PREFIX).rpartition("-v")[0]: name for name in known}


def begun(level: str, world: int) -> Any:
    """Returns the package's own environment after its reset with the seed `world`. Raises
    `SettingError` for an unknown level."""
    known = level_names()
    if level not in known:
        raise SettingError(
            f"tasks.babyai.levels: got '{level}', expected names such as GoToLocalS6N3 of the"
            f" package minigrid.{errors.nearest(level, list(known))}",
            code="unknown-game",
        )
    import gymnasium

    made = gymnasium.make(known[level], disable_env_checker=True).unwrapped
    with redirect_stdout(io.StringIO()):  # it tells which draws it has rejected
        made.reset(seed=world)
    return made


class BabyAI:
    """One world, as an environment (`core.interfaces.Environment`)."""

    capability = "fork"
    is_blocking = False
    tools = ("act",)

    def reset(self, level: str, world: int) -> str:
        """Begins a world and returns what is to be done, with what is seen first. Raises
        `SettingError` for an unknown level."""
        self._world = begun(level, world)
        self.done, self._reward = False, 0.0
        return f"{self._world.mission} ; {seen(self._world)}"

    def act(self, action: str) -> str:
        """Does one action: left and right turn, forward goes one square, pickup, drop, toggle (open
        or close what is ahead)."""
        action = action.strip().lower()
        if action not in ACTIONS:
            raise ToolError(UNKNOWN, code="query-unknown")
        _, reward, terminated, truncated, _ = self._world.step(ACTIONS.index(action))
        self.done = terminated or truncated
        told = seen(self._world)
        if not self.done:
            return told
        self._reward = float(reward > 0)
        end = NO_ACTIONS_LEFT if not terminated else SUCCESS if reward > 0 else FAILURE
        return f"{told} {end}"

    def fork(self) -> BabyAI:
        """Returns a further world in the same state."""
        return copy.deepcopy(self)

    def get_reward(self) -> float:
        """Returns 1 for a mission that is done, else 0; the package's own reward also falls with
        the number of actions."""
        return self._reward


def seen(world: Any) -> str:
    """Returns what is carried, the things in sight, the nearest first, and the wall ahead, with
    their distances in steps."""
    grid, visible = world.gen_obs_grid()
    column, row = grid.width // 2, grid.height - 1
    told: list[tuple[int, int, str]] = []
    for i in range(grid.width):
        for j in range(grid.height):
            thing = grid.get(i, j)
            if (
                not visible[i, j]
                or thing is None
                or thing.type == "wall"
                or (i, j) == (column, row)
            ):
                continue
            aside, ahead = i - column, row - j
            told.append((abs(aside) + ahead, aside, f"{_name(thing)} {_place(aside, ahead)}"))
    carried = [] if world.carrying is None else [f"carry {_name(world.carrying)}"]
    things = [text for _, _, text in sorted(told)]
    return " ".join(["see", *carried, *things, *_wall(grid, visible, column, row)])


def _name(thing: Any) -> str:
    states = (thing.is_open, not thing.is_locked, True) if thing.type == "door" else ()
    state = [word for word, holds in zip(_STATES, states, strict=False) if holds][:1]
    return " ".join([*state, thing.color, thing.type])


def _place(aside: int, ahead: int) -> str:
    ways = [("left", -aside), ("right", aside), ("forward", ahead)]
    return " ".join(f"{way} {steps}" for way, steps in ways if steps > 0)


def _wall(grid: Any, visible: Any, column: int, row: int) -> list[str]:
    """The nearest wall in sight ahead."""
    for steps in range(1, row + 1):
        thing = grid.get(column, row - steps)
        if not visible[column, row - steps]:
            break
        if thing is not None and thing.type == "wall":
            return [f"wall forward {steps}"]
    return []


def babyai_environments(settings: EnvironmentSettings) -> ClassEnvironments:
    """Returns the environments of `environment.kind = "babyai"`. Raises `SettingError` where the
    package is missing."""
    require("environment.kind", "babyai", "minigrid")
    made: type[Any] = BabyAI
    return ClassEnvironments(made, settings.kind, settings)
