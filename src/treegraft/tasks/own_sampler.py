"""A user's own sampler of training tasks, whose answers are checked before they are used."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from treegraft.core.errors import SettingError
from treegraft.core.import_paths import blaming
from treegraft.core.interfaces import TaskSampler
from treegraft.core.types import Task, Tree

SETTING = "sampler.kind"


class OwnSampler:
    """A `TaskSampler` that asks another one, and refuses what no update could go on with.

    Raises:
        SettingError: the other one raises an error, deals what is no task of the run, a task twice,
            one that was left out, too many or none, or has a state that is not JSON.
    """

    def __init__(self, sampler: TaskSampler, path: str, tasks: Sequence[Task]) -> None:
        self._sampler = sampler
        self._path = path
        self._tasks = {task.id: task for task in tasks}

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
        self._ask("restore", state)

    def references(self, number: int) -> Sequence[Task]:
        """Returns the other one's."""
        return self._different("references", self._ask("references", number))

    def label(self, number: int, trees: Sequence[Tree]) -> None:
        """Hands the trees on."""
        self._ask("label", number, trees)

    def draw(
        self, number: int, first: int, *, size: int, without: Collection[str] = ()
    ) -> Sequence[Task]:
        """Returns what the other one deals."""
        dealt = self._different(
            "draw", self._ask("draw", number, first, size=size, without=without)
        )
        again = [task.id for task in dealt if task.id in without]
        if again or len(dealt) > size or (not dealt and not without):
            got = f"{[task.id for task in dealt]!r:.200} for update {number}"
            expected = f"1 to {size} tasks (size), none of {sorted(without)!r:.200} (without)"
            raise self._refusal("draw", got, expected)
        return dealt

    def take(self, number: int, trees: Sequence[Tree]) -> None:
        """Hands the trees on."""
        self._ask("take", number, trees)

    def drawn(self, first: int) -> Sequence[str]:
        """Returns the ids that the other one gives."""
        return list(self._ask("drawn", first))

    def take_metrics(self) -> dict[str, float]:
        """Returns the other one's, as plain numbers."""
        return {str(name): float(value) for name, value in self._ask("take_metrics").items()}

    def _ask(self, member: str, *given: Any, **named: Any) -> Any:
        with blaming(self._path, SETTING):
            return getattr(self._sampler, member)(*given, **named)

    def _different(self, member: str, found: Any) -> list[Task]:
        """The tasks that a member has given, none twice."""
        with blaming(self._path, SETTING):
            given = list(found)
        known = [one for one in given if isinstance(one, Task) and self._tasks.get(one.id) == one]
        if len(known) < len(given) or len({task.id for task in known}) < len(given):
            got = [getattr(one, "id", one) for one in given]
            expected = "different tasks out of those that it was made with"
            raise self._refusal(member, f"{got!r:.200}", expected)
        return known

    def _refusal(self, member: str, got: str, expected: str) -> SettingError:
        return SettingError(
            f"{SETTING}: {member} of '{self._path}' gave {got}, expected {expected}; mend it"
            " there.",
            settings=[SETTING],
            code="sampler-invalid",
        )
