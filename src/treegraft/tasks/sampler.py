"""Samplers: which training tasks an update deals."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from treegraft.core.import_paths import make
from treegraft.core.interfaces import TaskSampler
from treegraft.core.keyed import keyed_int
from treegraft.core.registry import find
from treegraft.core.types import Task, Tree
from treegraft.settings.tasks import SamplerSettings
from treegraft.tasks.own_sampler import OwnSampler


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
