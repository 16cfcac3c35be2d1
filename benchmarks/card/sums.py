"""Questions for `benchmarks.gpu_demo` that need no package and no file: a product and a sum, which
a small model gets wrong in its head, and right with a line of python."""

from __future__ import annotations

import random
from collections.abc import Sequence

from treegraft import StepContent, Task
from treegraft.parts import Observation, OpenTasks, ToolCall


class Sums(OpenTasks):
    """`Sums(seed=0, num_train=9, num_eval=3)`: a · b ± c of three digits each."""

    def __init__(self, *, seed: int, num_train: int, num_eval: int) -> None:
        self._seed, self._num_train, self._num_eval = seed, num_train, num_eval

    def _tasks(self, purpose: str, num: int, seed: int = 0) -> list[Task]:
        draw = random.Random(f"{self._seed} {purpose} {seed}")
        found = []
        for number in range(num):
            a, b, c = (draw.randint(100, 999) for _ in range(3))
            sign = draw.choice("+-")
            value = a * b + c if sign == "+" else a * b - c
            question = f"What is {a} * {b} {sign} {c}?"
            found.append(Task(id=f"{purpose}/{number}", question=question, reference=(str(value),)))
        return found

    def train_tasks(self) -> Sequence[Task]:
        """Returns the tasks to train on."""
        return self._tasks("train", self._num_train)

    def eval_tasks(self) -> Sequence[Task]:
        """Returns the held-out tasks."""
        return self._tasks("eval", self._num_eval)

    def warmup_tasks(self, num: int, seed: int) -> Sequence[Task]:
        """Returns tasks for the warm-up."""
        return self._tasks("warmup", num, seed)

    def expert(self, task: Task, seed: int) -> tuple[StepContent, ...]:
        """Returns the steps of an expert, who lets python compute."""
        term = task.question.removeprefix("What is ").removesuffix("?")
        (value,) = task.reference
        calls = (ToolCall("python", f"print({term})"),)
        seen = (Observation(text=value),)
        return (
            StepContent(thought="I let python compute this.", calls=calls, observations=seen),
            StepContent(thought=f"Python gives {value}.", answer=value),
        )
