"""Tasks of your own, with an expert that warms the agent up: tell the larger of two numbers.

python examples/own_tasks.py
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence

from treegraft import StepContent, Task, train
from treegraft.parts import OpenTasks


class Larger(OpenTasks):
    """Questions such as "n3 n7 ?"; the methods are those of
    `treegraft.core.interfaces.TaskSource`."""

    def __init__(self, *, seed: int, num_train: int, num_eval: int, largest: int) -> None:
        self.seed = seed
        self.num_train = num_train
        self.num_eval = num_eval
        self.largest = largest

    def _tasks(self, purpose: str, num: int, seed: int = 0) -> list[Task]:
        rng = random.Random(f"{self.seed} {purpose} {seed}")
        pairs = [rng.sample(range(self.largest), 2) for _ in range(num)]
        return [
            Task(id=f"{purpose}/{n}", question=f"n{a} n{b} ?", reference=(f"n{max(a, b)}",))
            for n, (a, b) in enumerate(pairs)
        ]

    def train_tasks(self) -> Sequence[Task]:
        return self._tasks("train", self.num_train)

    def eval_tasks(self) -> Sequence[Task]:
        return self._tasks("eval", self.num_eval)

    def warmup_tasks(self, num: int, seed: int) -> Sequence[Task]:
        return self._tasks("warmup", num, seed)

    def expert(self, task: Task, seed: int) -> tuple[StepContent, ...]:
        return (StepContent(answer=task.reference[0]),)

    def vocabulary(self) -> Sequence[str]:
        return ["?", *(f"n{number}" for number in range(self.largest))]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "run": {"dir": folder, "num_updates": 0, "num_threads": 1},
            "tasks": {
                "num_train": 16,
                "num_eval": 16,
                "options": {"largest": 5},
            },
            "format": {"system_prompt": "", "require_think": False},
            "rollout": {"max_tool_calls": 0, "max_completion_tokens": 8},
            "warmup": {"num_steps": 30, "batch_size": 20, "lr": 5e-3, "lr_warmup_steps": 5},
        }
        print(f"accuracy {train(settings, tasks=Larger).metrics['eval/accuracy']:.2f}")
