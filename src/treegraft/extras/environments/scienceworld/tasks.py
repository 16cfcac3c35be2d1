"""Worlds of ScienceWorld by their task and variation, with the package's own gold paths as expert.

The package parts the variations of each task into train, dev and test. Training and warm-up share
the train ones without overlap; dev or test are held out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import chain, zip_longest
from typing import Any, Final, NamedTuple

from treegraft import DataError, SettingError, StepContent, Task, ToolUnavailable
from treegraft.extras.environments.scienceworld.environment import (
    COMPLETED,
    FAILED,
    NO_ACTIONS_LEFT,
    Game,
    game_names,
    gold_path,
    require,
    splits_of,
)
from treegraft.extras.environments.scienceworld.plugin import ScienceWorldSettings
from treegraft.extras.environments.scienceworld.words import WORDS
from treegraft.parts import ToolCall, errors, interfaces, keyed

DONE: Final = "done"
"""The expert's answer, which the reward takes no notice of."""
_MAX_KEPT: Final = 4096
_gold_path = lru_cache(_MAX_KEPT)(gold_path)


class _Purposes(NamedTuple):
    """Variations of one game by what they are for."""

    train: Sequence[Task]
    warmup: Sequence[Task]
    eval: Sequence[Task]


class ScienceWorldTasks:
    """Worlds in equal shares by their game. Their environment is `environment.kind =
    "scienceworld"`."""

    def __init__(
        self, settings: ScienceWorldSettings, *, seed: int, num_train: int, num_eval: int
    ) -> None:
        """Raises `SettingError` where the package or Java is missing, for an unknown game, and for
        a simplification that removes what a game needs."""
        require("tasks.kind")
        known = game_names()
        for name in settings.games:
            if name not in known:
                raise SettingError(
                    f"tasks.scienceworld.games: got '{name}', expected names of"
                    f" {', '.join(known)}.{errors.nearest(name, known)}",
                    code="unknown-game",
                )
            is_electrical = "power-component" in name or "conductivity" in name
            if is_electrical and "noElectricalAction" in settings.simplifications:
                raise SettingError(
                    "tasks.scienceworld.simplifications: got 'noElectricalAction', but the game"
                    f" '{name}' needs these actions; leave one of them out.",
                    code="game-needs-electricity",
                )
        self._settings, self._seed = settings, seed
        self._num_train, self._num_eval = num_train, num_eval

    def train_tasks(self) -> Sequence[Task]:
        """Returns the training worlds, the games taking turns."""
        return self._train

    def eval_tasks(self) -> Sequence[Task]:
        """Returns the held-out worlds, the games taking turns."""
        return self._eval

    def tools(self) -> Sequence[interfaces.Tool]:
        """Returns none: the environment brings the action."""
        return ()

    def expert(self, task: Task, seed: int) -> tuple[StepContent, ...] | None:
        """Returns the gold path up to the end of the task, and an answer; None where it does not
        complete the task, and for a task of another source.

        The path is that of the package, useless steps such as opening an open door included. Where
        it focuses on something in a room that it has not looked at, a look comes before, since
        nobody could know what is there.

        Raises:
            DataError: the Java process failed.
        """
        if not {"game", "variation", "simplifications"} <= task.columns.keys():
            return None
        game = Game(*(task.columns[name] for name in ("game", "variation", "simplifications")))
        try:
            actions = _gold_path(game)
        except ToolUnavailable as error:
            raise DataError(
                f"the gold path of task '{task.id}' cannot be had: {error}",
                code="gold-path-missing",
            ) from error
        if actions is None:
            return None
        steps = [StepContent(calls=(ToolCall("act", action),)) for action in actions]
        return (*steps, StepContent(answer=DONE))

    def early_answer(self, task: Task, steps: Sequence[StepContent]) -> str | None:
        """Returns that it is done, which it is not."""
        return DONE

    def warmup_tasks(self, num: int, seed: int) -> Sequence[Task]:
        """Returns worlds of the train variations that are not trained on, drawn again and again."""
        kept = [purposes.warmup for purposes in self._purposes if purposes.warmup]
        return tuple(
            keyed.keyed_choice(kept[n % len(kept)], "warmup", seed, n)
            for n in range(num if kept else 0)
        )

    def vocabulary(self) -> Sequence[str]:
        """Returns the words of tasks, results and actions. Words of the lifespan games are all
        there; in other games some are missing, such as temperatures."""
        own = (_question(name) for name in self._settings.games)
        return (*WORDS, *" ".join([*own, COMPLETED, FAILED, NO_ACTIONS_LEFT, DONE]).split())

    def report(self) -> Sequence[str]:
        """Returns nothing: gold paths are looked at when they are needed."""
        return ()

    @cached_property
    def _train(self) -> tuple[Task, ...]:
        return _in_turns((one.train for one in self._purposes), self._num_train)

    @cached_property
    def _eval(self) -> tuple[Task, ...]:
        return _in_turns((one.eval for one in self._purposes), self._num_eval)

    @cached_property
    def _purposes(self) -> tuple[_Purposes, ...]:
        return tuple(self._purposes_of(name) for name in dict.fromkeys(self._settings.games))

    def _purposes_of(self, name: str) -> _Purposes:
        simplifications = ",".join(self._settings.simplifications)
        try:
            splits = splits_of(name, simplifications)
        except ToolUnavailable as error:
            raise DataError(
                f"tasks.scienceworld: '{name}' cannot be had: {error}", code="game-not-read"
            ) from error

        def tasks(purpose: str, numbers: Iterable[int]) -> list[Task]:
            return [self._task(purpose, name, number, simplifications) for number in numbers]

        # Neighbours are alike, so that the first ones would be a poor choice.
        numbers = sorted(splits.train, key=lambda number: keyed.keyed_int(self._seed, name, number))
        num_warmup = min(self._settings.num_warmup, len(numbers) // 2)
        held_out = splits.dev if self._settings.held_out == "dev" else splits.test
        spread = sorted(held_out, key=lambda number: keyed.keyed_int(self._seed, name, number))
        return _Purposes(
            tasks("train", numbers[num_warmup:]),
            tasks("warmup", numbers[:num_warmup]),
            tasks(self._settings.held_out, spread),
        )

    def _task(self, purpose: str, name: str, number: int, simplifications: str) -> Task:
        return Task(
            id=f"scienceworld/{purpose}/{name}/{number}",
            question=_question(name),
            reference=(),
            category=name,
            columns={
                "game": name,
                "variation": number,
                "simplifications": simplifications,
                "max_actions": self._settings.max_actions,
            },
        )


def _question(name: str) -> str:
    # What is to be done stands in the environment's first observation.
    return f"ScienceWorld {name}"


def _in_turns(games: Iterable[Sequence[Task]], num: int) -> tuple[Task, ...]:
    rounds = chain.from_iterable(zip_longest(*games))
    return tuple(task for task in rounds if task is not None)[:num]


def scienceworld_tasks(settings: Any, seed: int) -> ScienceWorldTasks:
    """Returns the games of a table [tasks]."""
    return ScienceWorldTasks(
        settings.scienceworld, seed=seed, num_train=settings.num_train, num_eval=settings.num_eval
    )
