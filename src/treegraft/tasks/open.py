"""A base class for task sources without tools, expert or closed vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

from treegraft.core.interfaces import Tool
from treegraft.core.types import StepContent, Task


class OpenTasks:
    """The base of a `TaskSource` without tools, expert or closed vocabulary."""

    def tools(self) -> Sequence[Tool]:
        """Returns none: the recipe or the environment brings them."""
        return ()

    def expert(self, task: Task, seed: int) -> tuple[StepContent, ...] | None:
        """Returns None: no expert is scripted for these questions."""
        return None

    def early_answer(self, task: Task, steps: Sequence[StepContent]) -> str | None:
        """Returns None: these tasks do not know which observation holds the answer."""
        return None

    def warmup_tasks(self, num: int, seed: int) -> Sequence[Task]:
        """Returns none: there is no expert."""
        return ()

    def vocabulary(self) -> Sequence[str]:
        """Returns nothing: the language is open."""
        return ()

    def report(self) -> Sequence[str]:
        """Returns nothing: no defects are looked for."""
        return ()
