"""From the [tasks] table of a recipe to a source of tasks."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from treegraft.core.errors import DataError, about
from treegraft.core.import_paths import make
from treegraft.core.interfaces import TaskSource, Tool
from treegraft.core.registry import find
from treegraft.core.types import Task
from treegraft.settings.policy import WarmupSettings
from treegraft.settings.tasks import TasksSettings
from treegraft.tasks.datasets import DatasetSource
from treegraft.tasks.readers import words_in
from treegraft.tasks.search_world import SearchWorld
from treegraft.tools.build import words_of


def build_tasks(settings: TasksSettings, seed: int) -> TaskSource:
    """Returns the source of tasks that `settings.kind` names.

    A source given by import path is called with seed, num_train, num_eval and the entries
    of tasks.options and tasks.expert_options.

    Raises:
        SettingError: an unknown kind, an import path to nothing that makes a task source, or
            settings it refuses.
        DataError: the files of a data set cannot be read.
    """
    # Of ours and of extensions, a maker; of an import path, the user's own.
    found = find(settings.kind, TASKS, "tasks", "tasks.kind")
    if ":" not in settings.kind:
        built_in: TaskSource = found(settings, seed)
        return built_in
    source: TaskSource = make(
        found,
        TaskSource,
        settings.kind,
        "tasks.kind",
        seed=seed,
        num_train=settings.num_train,
        num_eval=settings.num_eval,
        **(settings.options | settings.expert_options),
    )
    return source


TASKS: Mapping[str, Callable[[TasksSettings, int], TaskSource]] = {
    "search_world": lambda settings, seed: SearchWorld(
        settings.search_world, seed=seed, num_train=settings.num_train, num_eval=settings.num_eval
    ),
    "dataset": lambda settings, seed: DatasetSource(
        settings.dataset, num_train=settings.num_train, num_eval=settings.num_eval
    ),
}


def distinct(tasks: Sequence[Task], member: str) -> list[Task]:
    """Returns the tasks that a member of a source has given. Raises `DataError` for an id that two
    of them have, or that no file can hold: noise, groups and stored steps go by it."""
    for name, count in Counter(task.id for task in tasks).items():
        if count > 1 or re.search("[\ud800-\udfff]", str(name)):
            raise DataError(
                f"tasks: {member} gave the id {name!r} to {count} of its tasks, expected one of its"
                " own for each, without half a surrogate pair. Questions may be the same.",
                settings=["tasks.kind"],
                code="task-id-invalid",
            )
    return list(tasks)


def tasks_checksum(*sets: Sequence[Task]) -> str:
    """Returns a checksum of sets of tasks; of objects in their columns their types count alone,
    since the texts of some differ from process to process."""
    digest = hashlib.blake2b(digest_size=16)
    for number, tasks in enumerate(sets):
        for one in tasks:
            facts = (number, one.id, one.question, one.reference, one.category, one.messages)
            text = json.dumps([*facts, one.columns], skipkeys=True, default=lambda x: str(type(x)))
            digest.update(text.encode())
    return digest.hexdigest()


def closed_vocabulary(
    source: TaskSource, tools: Sequence[Tool], warmup: WarmupSettings
) -> list[str]:
    """Returns the words of tasks, tools and the file of demonstrations; none where the tasks'
    language is open."""
    words = source.vocabulary()
    if not words:
        return []
    # Demonstrations are JSONL whatever a file is called; only where it says so it is read as rows.
    is_file = warmup.num_steps > 0 and warmup.traces.endswith(".jsonl")
    with about("warmup.traces"):
        shown = words_in(warmup.traces) if is_file else []
    return [*words, *words_of(tools), *shown]
