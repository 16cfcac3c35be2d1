"""Samplers: which training tasks an update deals."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from treegraft.core.errors import SettingError
from treegraft.core.import_paths import blaming, make
from treegraft.core.interfaces import TaskSampler
from treegraft.core.keyed import keyed_int
from treegraft.core.registry import find
from treegraft.core.types import Task, Tree
from treegraft.settings.tasks import SamplerSettings


def build_sampler(settings: SamplerSettings, tasks: Sequence[Task], seed: int) -> TaskSampler:
    """Returns the sampler of the training tasks that `settings.kind` names.

    A sampler given by import path is called with tasks, seed and the entries of sampler.options;
    what it answers is checked (`OwnSampler`).

    Raises:
        SettingError: an unknown kind or encoder, or an import path to nothing that makes a sampler.
        ModelError: there is no such encoder to load.
    """
    found = find(settings.kind, SAMPLERS, "sampler", "sampler.kind")
    if ":" not in settings.kind:
        built_in: TaskSampler = found(tasks, seed, settings)
        return built_in
    sampler: TaskSampler = make(
        found,
        TaskSampler,
        settings.kind,
        "sampler.kind",
        tasks=tasks,
        seed=seed,
        **settings.options,
    )
    checked: Any = OwnSampler(sampler, settings.kind, tasks)
    _ = checked.state  # refused now, not after the first update
    own: TaskSampler = checked
    return own


class OwnSampler:
    """A user's own sampler, whose answers are checked before they are used. Members without a check
    are its own, whose errors name it.

    Raises:
        SettingError: it raises an error, has a state that is not JSON, or deals what is no task of
            the run, a task twice, one that was left out, too many or none.
    """

    def __init__(self, sampler: TaskSampler, path: str, tasks: Sequence[Task]) -> None:
        self._sampler = sampler
        self._path = path
        self._tasks = {task.id: task for task in tasks}

    def __getattr__(self, member: str) -> Callable[..., Any]:
        def ask(*args: Any, **named: Any) -> Any:
            with blaming(self._path, "sampler.kind"):
                return getattr(self._sampler, member)(*args, **named)

        return ask

    @property
    def state(self) -> Mapping[str, Any]:
        """That of the user's sampler, as a checkpoint holds it."""
        with blaming(self._path, "sampler.kind", " in state, which checkpoints hold as JSON"):
            # Now, not when a checkpoint is written after an update that took an hour.
            return dict(json.loads(json.dumps(self._sampler.state)))

    def draw(
        self, number: int, first: int, *, size: int, without: Collection[str] = ()
    ) -> Sequence[Task]:
        """Returns the tasks that the user's sampler deals."""
        with blaming(self._path, "sampler.kind"):
            dealt: list[Any] = list(self._sampler.draw(number, first, size=size, without=without))
        usable: set[str] = set()
        for one in dealt:
            # Equal, not only of one id: its columns are what rewards and environments see.
            if isinstance(one, Task) and self._tasks.get(one.id) == one and one.id not in without:
                usable.add(one.id)
        if len(usable) < len(dealt) or len(dealt) > size or not (dealt or without):
            got = [getattr(one, "id", one) for one in dealt]
            raise SettingError(
                f"sampler.kind: draw of '{self._path}' gave {got!r:.200} for update {number},"
                f" expected 1 to {size} different tasks (size) out of those that it was made with,"
                f" none of {sorted(without)!r:.200} (without); mend it there.",
                settings=["sampler.kind"],
                code="sampler-invalid",
            )
        return dealt


# --- in turn --------------------------------------------------------------------------------------


def draw_tasks(
    tasks: Sequence[Task], first: int, *, size: int, seed: int, without: Collection[str] = ()
) -> list[Task]:
    """Returns the tasks at places `first` to `first + size` of epochs over all tasks, each shuffled
    by a key of its own; none twice.

    Args:
        first: tasks drawn so far.
        without: ids of tasks that are left out.
    """
    orders: dict[int, list[int]] = {}
    chosen: dict[str, Task] = {}
    for position in range(first, first + size):
        epoch, place = divmod(position, len(tasks))
        if epoch not in orders:
            # A function of seed and epoch alone, so that a resumed run needs no generator's state.
            keys = {n: keyed_int(seed, "epoch", epoch, n) for n in range(len(tasks))}
            orders[epoch] = sorted(keys, key=keys.__getitem__)
        task = tasks[orders[epoch][place]]
        # Left out rather than replaced: `first` counts places, not tasks.
        if task.id not in without:
            chosen.setdefault(task.id, task)
    return list(chosen.values())


class Epochs:
    """Deals every task once an epoch, each epoch in an order of its own. It needs no state; other
    samplers override its methods."""

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        self._tasks = tasks
        self._seed = seed

    @property
    def state(self) -> Mapping[str, Any]:
        """Empty: the seed alone decides the order."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Does nothing."""

    def references(self, number: int) -> Sequence[Task]:
        """Returns none."""
        return ()

    def label(self, number: int, trees: Sequence[Tree]) -> None:
        """Does nothing."""

    def draw(
        self, number: int, first: int, *, size: int, without: Collection[str] = ()
    ) -> Sequence[Task]:
        """Returns `draw_tasks` from the place `first` on."""
        return draw_tasks(self._tasks, first, size=size, seed=self._seed, without=without)

    def take(self, number: int, trees: Sequence[Tree]) -> None:
        """Does nothing."""

    def drawn(self, first: int) -> Sequence[str]:
        """Returns the ids of the first `first` tasks."""
        return [task.id for task in draw_tasks(self._tasks, 0, size=first, seed=self._seed)]

    def take_metrics(self) -> dict[str, float]:
        """Returns no metrics."""
        return {}


SAMPLERS: Mapping[str, Callable[[Sequence[Task], int, SamplerSettings], TaskSampler]] = {
    "epochs": lambda tasks, seed, _: Epochs(tasks, seed),
}
