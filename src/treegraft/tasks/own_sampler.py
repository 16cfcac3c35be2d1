"""A user's own sampler of training tasks, whose answers are checked before they are used."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from treegraft.core.errors import SettingError
from treegraft.core.import_paths import blaming
from treegraft.core.interfaces import TaskSampler
from treegraft.core.types import Task, Tree

SETTING = "sampler.kind"


class OwnSampler:
    """A `TaskSampler` that asks another one, and refuses what no update could go on with.

    Every member but `restore`, `label` and `take` checks what comes back.

    Raises:
        SettingError: the other one raises an error, deals what is no task of the run, a task twice,
            one that was left out, too many or none, or has a state that is not JSON.
    """

    def __init__(self, sampler: TaskSampler, path: str, tasks: Sequence[Task]) -> None:
        self._sampler, self._path = sampler, path
        self._tasks = {task.id: task for task in tasks}

    def _refusal(self, member: str, got: str, expected: str) -> SettingError:
        return SettingError(
            f"{SETTING}: {member} of '{self._path}' gave {got}, expected {expected}; mend it"
            " there.",
            settings=[SETTING],
            code="sampler-invalid",
        )

    def _different(self, member: str, found: Any) -> list[Task]:
        """The tasks that a member has given, none twice."""
        if not isinstance(found, Iterable):
            raise self._refusal(member, f"a {type(found).__name__}", "a list of tasks")
        given = list(found)
        for one in given:
            if not isinstance(one, Task) or self._tasks.get(one.id) != one:
                what = f"the task '{one.id}'" if isinstance(one, Task) else f"{one!r:.80}"
                raise self._refusal(member, what, "tasks out of those that it was made with")
        name, times = next(iter(Counter(task.id for task in given).most_common(1)), ("", 0))
        if times > 1:
            raise self._refusal(member, f"the task '{name}' {times} times", "different tasks")
        return given

    @property
    def state(self) -> Mapping[str, Any]:
        """The other one's."""
        with blaming(self._path, SETTING):
            found = self._sampler.state
        try:
            read = json.loads(json.dumps(found))
        except (TypeError, ValueError) as error:
            expected = "JSON: numbers as int() and float() give them, arrays as .tolist() does"
            raise self._refusal("state", f"what cannot be kept ({error})", expected) from error
        if not isinstance(read, dict):
            raise self._refusal("state", f"a {type(found).__name__}", "a mapping")
        return read

    def restore(self, state: Mapping[str, Any]) -> None:
        """Hands the state on."""
        with blaming(self._path, SETTING):
            self._sampler.restore(state)

    def references(self, number: int) -> Sequence[Task]:
        """Returns the other one's."""
        with blaming(self._path, SETTING):
            found = self._sampler.references(number)
        return self._different("references", found)

    def label(self, number: int, trees: Sequence[Tree]) -> None:
        """Hands the trees on."""
        with blaming(self._path, SETTING):
            self._sampler.label(number, trees)

    def draw(
        self, number: int, first: int, *, size: int, without: Collection[str] = ()
    ) -> Sequence[Task]:
        """Returns what the other one deals."""
        with blaming(self._path, SETTING):
            found = self._sampler.draw(number, first, size=size, without=without)
        dealt = self._different("draw", found)
        if len(dealt) > size:
            raise self._refusal("draw", f"{len(dealt)} tasks", f"at most size = {size}")
        if again := [task.id for task in dealt if task.id in without]:
            raise self._refusal("draw", f"'{again[0]}', which is in without", "other tasks")
        if not dealt and not without:
            raise self._refusal("draw", f"no task for update {number}", "at least one")
        return dealt

    def take(self, number: int, trees: Sequence[Tree]) -> None:
        """Hands the trees on."""
        with blaming(self._path, SETTING):
            self._sampler.take(number, trees)

    def drawn(self, first: int) -> Sequence[str]:
        """Returns the ids that the other one gives."""
        with blaming(self._path, SETTING):
            found = list(self._sampler.drawn(first))
        if unknown := [one for one in found if one not in self._tasks]:
            raise self._refusal("drawn", f"{unknown[0]!r:.80}", "ids of tasks")
        return found

    def take_metrics(self) -> dict[str, float]:
        """Returns the other one's, as plain numbers."""
        with blaming(self._path, SETTING):
            found = {
                str(name): float(value) for name, value in self._sampler.take_metrics().items()
            }
        return found
