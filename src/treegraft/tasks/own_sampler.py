"""A user's own sampler of training tasks, whose answers are checked before they are used."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from treegraft.core.errors import SettingError
from treegraft.core.import_paths import blaming
from treegraft.core.interfaces import TaskSampler
from treegraft.core.types import Task

SETTING = "sampler.kind"


class OwnSampler:
    """A `TaskSampler` that asks another one, and refuses what no update could go on with. Members
    without a check are the other one's own, whose errors name it.

    Raises:
        SettingError: the other one raises an error, deals what is no task of the run, a task twice,
            one that was left out, too many or none, or has a state that is not JSON.
    """

    def __init__(self, sampler: TaskSampler, path: str, tasks: Sequence[Task]) -> None:
        self._sampler = sampler
        self._path = path
        self._tasks = {task.id: task for task in tasks}

    def __getattr__(self, member: str) -> Callable[..., Any]:
        def ask(*args: Any, **named: Any) -> Any:
            with blaming(self._path, SETTING):
                return getattr(self._sampler, member)(*args, **named)

        return ask

    @property
    def state(self) -> Mapping[str, Any]:
        """The other one's."""
        with blaming(self._path, SETTING):
            found = self._sampler.state
        # Now, not when a checkpoint is written after an update that took an hour.
        try:
            read = json.loads(json.dumps(found))
        except (TypeError, ValueError) as error:
            expected = "JSON: numbers as int() and float() give them, arrays as .tolist() does"
            raise self._refusal("state", f"what cannot be kept ({error})", expected) from error
        if not isinstance(read, dict):
            raise self._refusal("state", f"a {type(found).__name__}", "a mapping")
        return read

    def references(self, number: int) -> Sequence[Task]:
        """Returns the other one's."""
        with blaming(self._path, SETTING):
            found = list(self._sampler.references(number))
        return self._different("references", found)

    def draw(
        self, number: int, first: int, *, size: int, without: Collection[str] = ()
    ) -> Sequence[Task]:
        """Returns what the other one deals."""
        with blaming(self._path, SETTING):
            found = list(self._sampler.draw(number, first, size=size, without=without))
        dealt = self._different("draw", found)
        again = [task.id for task in dealt if task.id in without]
        if again or len(dealt) > size or (not dealt and not without):
            got = f"{[task.id for task in dealt]!r:.200} for update {number}"
            expected = f"1 to {size} tasks (size), none of {sorted(without)!r:.200} (without)"
            raise self._refusal("draw", got, expected)
        return dealt

    def _different(self, member: str, dealt: Sequence[Any]) -> list[Task]:
        """The tasks that a member has dealt, none twice."""
        known: dict[str, Task] = {}
        for one in dealt:
            # Equal, not only of one id: its columns are what rewards and environments see.
            if isinstance(one, Task) and self._tasks.get(one.id) == one:
                known[one.id] = one
        if len(known) < len(dealt):
            got = [getattr(one, "id", one) for one in dealt]
            expected = "different tasks out of those that it was made with"
            raise self._refusal(member, f"{got!r:.200}", expected)
        return list(known.values())

    def _refusal(self, member: str, got: str, expected: str) -> SettingError:
        return SettingError(
            f"{SETTING}: {member} of '{self._path}' gave {got}, expected {expected}; mend it"
            " there.",
            settings=[SETTING],
            code="sampler-invalid",
        )
