"""The order in which a run draws its training tasks."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from treegraft.core.keyed import keyed_int
from treegraft.core.types import Task


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
            keys = [(keyed_int(seed, "epoch", epoch, n), n) for n in range(len(tasks))]
            orders[epoch] = [n for _, n in sorted(keys)]
        task = tasks[orders[epoch][place]]
        if task.id not in without:
            chosen.setdefault(task.id, task)
    return list(chosen.values())
