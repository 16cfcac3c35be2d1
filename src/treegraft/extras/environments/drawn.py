"""Tasks whose worlds another package draws: a level and a number are a world, the same in every
process. Numbers of training, evaluation and warm-up never meet."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import ClassVar, Final

from treegraft import SettingError, StepContent, Task
from treegraft.parts import ToolCall, interfaces, keyed

DONE: Final = "done"
"""The expert's answer, which the reward takes no notice of."""
TOOL: Final = "act"
PURPOSES: Final = ("train", "eval", "warmup")
NUM_WARMUP_WORLDS: Final = 128
"""Worlds that a warm-up shows, again and again: to draw one takes milliseconds."""
_NUM_WORLDS: Final = 2**29


def require(place: str, family: str, *packages: str) -> None:
    """Raises `SettingError`, which names `place`, where a package is missing."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise SettingError(
            f"{place}: {family} needs the package '{missing[0]}'; run:"
            f" pip install 'treegraft[{family}]'.",
            code="package-missing",
        )


class DrawnTasks(ABC):
    """Worlds of a family in equal shares by their level, played by the tool `act`."""

    family: ClassVar[str]
    """As in `tasks.kind`."""

    def __init__(
        self, levels: Sequence[str | int], *, seed: int, num_train: int, num_eval: int
    ) -> None:
        self._levels, self._seed = levels, seed
        self._num_train, self._num_eval = num_train, num_eval

    @abstractmethod
    def question(self, level: str | int) -> str:
        """Returns the question; the world's own part of it is the first observation."""

    @abstractmethod
    def solution(self, level: str | int, world: int) -> Sequence[str] | None:
        """Returns the actions of the package's own expert; None where it fails."""

    @abstractmethod
    def words(self) -> Sequence[str]:
        """Returns every word of observations and actions."""

    def train_tasks(self) -> Sequence[Task]:
        """Returns the training worlds, the levels taking turns."""
        return self._train

    def eval_tasks(self) -> Sequence[Task]:
        """Returns the held-out worlds, the levels taking turns."""
        return self._eval

    def tools(self) -> Sequence[interfaces.Tool]:
        """Returns none: the environment brings the action."""
        return ()

    def expert(self, task: Task, seed: int) -> tuple[StepContent, ...] | None:
        """Returns what the package's expert does, and an answer; None where it fails, and for a
        task of another source."""
        if not {"level", "world"} <= task.columns.keys():
            return None
        actions = self.solution(task.columns["level"], task.columns["world"])
        if actions is None:
            return None
        steps = [StepContent(calls=(ToolCall(TOOL, action),)) for action in actions]
        return (*steps, StepContent(answer=DONE))

    def early_answer(self, task: Task, steps: Sequence[StepContent]) -> str | None:
        """Returns that it is done, which it is not."""
        return DONE

    def warmup_tasks(self, num: int, seed: int) -> Sequence[Task]:
        """Returns worlds that are neither trained nor evaluated on, drawn again and again."""
        return tuple(
            self._task("warmup", keyed.keyed_int("drawn", seed, n) % NUM_WARMUP_WORLDS)
            for n in range(num)
        )

    def vocabulary(self) -> Sequence[str]:
        """Returns every word of questions, observations, actions and answers."""
        questions = [self.question(level) for level in self._levels]
        return (*self.words(), *" ".join([*questions, DONE]).split())

    def report(self) -> Sequence[str]:
        """Returns nothing: worlds are drawn when they are needed."""
        return ()

    @cached_property
    def _train(self) -> tuple[Task, ...]:
        return tuple(self._task("train", n) for n in range(self._num_train))

    @cached_property
    def _eval(self) -> tuple[Task, ...]:
        return tuple(self._task("eval", n) for n in range(self._num_eval))

    def _task(self, purpose: str, number: int) -> Task:
        level = self._levels[number % len(self._levels)]
        drawn = keyed.keyed_int(self.family, self._seed, purpose, number) % _NUM_WORLDS
        return Task(
            id=f"{self.family}/{purpose}/{number}",
            question=self.question(level),
            reference=(),
            category=f"level {level}" if isinstance(level, int) else level,
            # The remainder is the purpose, so that no world serves two.
            columns={
                "level": level,
                "world": drawn * len(PURPOSES) + PURPOSES.index(purpose),
            },
        )
