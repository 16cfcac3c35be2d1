"""Tasks of a taskset of the package verifiers, for environment.kind = "verifiers"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treegraft import DataError, Task
from treegraft.extras.environments.verifiers.environment import VerifiersOptions, read_tasks
from treegraft.parts import OpenTasks


class VerifiersTasks(OpenTasks):
    """The first tasks of a taskset for training, the next ones held out; without references, since
    the environment rewards."""

    def __init__(
        self,
        *,
        seed: int,
        num_train: int,
        num_eval: int,
        taskset: str,
        settings: dict[str, Any] | None = None,
    ) -> None:
        """Raises `SettingError` and `DataError` for a taskset that cannot be had, or that has too
        few tasks to hold any out."""
        options = VerifiersOptions(taskset=taskset, settings=settings or {})
        tasks = read_tasks(options, num_train + num_eval, "tasks.options")
        if len(tasks) <= num_eval:
            raise DataError(
                f"tasks.options: '{taskset}' has {len(tasks)} tasks; expected more than"
                f" tasks.num_eval = {num_eval}.",
                code="tasks-too-few",
            )
        num = len(tasks) - num_eval
        self._train = tasks[:num]
        self._eval = tasks[num:]

    def train_tasks(self) -> Sequence[Task]:
        """Returns the first tasks."""
        return self._train

    def eval_tasks(self) -> Sequence[Task]:
        """Returns the ones after them."""
        return self._eval
