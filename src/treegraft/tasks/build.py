"""From the [tasks] table of a recipe to a source of tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from treegraft.core.errors import SettingError
from treegraft.core.interfaces import TaskSource
from treegraft.core.plugins import pick
from treegraft.settings.tasks import TasksSettings
from treegraft.tasks.arithmetic import ReasoningGym
from treegraft.tasks.datasets import DatasetSource
from treegraft.tasks.search_world import SearchWorld

_METHODS = tuple(name for name in vars(TaskSource) if not name.startswith("_"))


def build_tasks(settings: TasksSettings, seed: int) -> TaskSource:
    """Returns the source of tasks that `settings.kind` names.

    A source given by import path is called with seed, num_train, num_eval and the entries
    of tasks.options.

    Raises:
        SettingError: an unknown kind, an import path to nothing that makes a task source, or
            settings it refuses.
        DataError: the files of a data set cannot be read.
    """
    make = pick(settings.kind, TASKS, "tasks.kind")
    if settings.kind in TASKS:
        built_in: TaskSource = make(settings, seed)
        return built_in
    try:
        source: TaskSource = make(
            seed=seed, num_train=settings.num_train, num_eval=settings.num_eval, **settings.options
        )
    except TypeError as error:
        raise SettingError(
            f"tasks.kind '{settings.kind}' could not be called with seed, num_train, num_eval and"
            f" tasks.options ({', '.join(settings.options) or 'none'}): {error}"
        ) from error
    # Checked by hand, since isinstance() with a Protocol does not say which method is missing.
    missing = [name for name in _METHODS if not callable(getattr(source, name, None))]
    if missing:
        raise SettingError(
            f"tasks.kind '{settings.kind}' gave a {type(source).__name__} without"
            f" {', '.join(missing)}; expected every method of"
            " treegraft.core.interfaces.TaskSource"
        )
    return source


TASKS: Mapping[str, Callable[[TasksSettings, int], TaskSource]] = {
    "search_world": lambda settings, seed: SearchWorld(
        settings.search_world, seed=seed, num_train=settings.num_train, num_eval=settings.num_eval
    ),
    "arithmetic": lambda settings, seed: ReasoningGym(
        settings.arithmetic, seed=seed, num_train=settings.num_train, num_eval=settings.num_eval
    ),
    "dataset": lambda settings, seed: DatasetSource(
        settings.dataset, num_train=settings.num_train, num_eval=settings.num_eval
    ),
}
