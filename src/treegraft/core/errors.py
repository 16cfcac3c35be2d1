"""Every error that Treegraft raises on purpose.

    TreegraftError
    ├── SettingError      (ValueError)    a recipe or an override: unknown, wrong, without effect
    ├── DataError         (ValueError)    tasks, corpora, records: missing column, unreadable file
    ├── ModelError        (ValueError)    a model or tokenizer: missing, incomplete, does not fit
    ├── CheckpointError   (ValueError)    a checkpoint or run folder: damaged, foreign, in the way
    ├── ToolError         (RuntimeError)  raised by a tool; becomes an observation
    │   └── ToolUnavailable               the service behind a tool is down: not the agent's fault
    ├── EngineError       (RuntimeError)  an engine that died, lost a request or cannot do it
    ├── KernelError       (RuntimeError)  C kernels that do not compile or load; torch takes over
    ├── StorageError      (RuntimeError)  files that could not be written: disk full, read-only
    ├── DeadlineExceeded  (TimeoutError)  a wait that ran out, with its owner
    └── DriftError        (RuntimeError)  engine and learner no longer hold the same policy

A message says what is wrong with its name, what was got, what was expected, and what to do. Its
`code` names the reason in kebab case, such as "unknown-setting", for programs: it stays when the
message is edited, belongs to one class, and the same reason has the same code everywhere.

A failure inside one rollout is data on its leaf (`Status.FAILED`), not an exception; `rollout.loop`
is the one place that turns the one into the other.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path


class TreegraftError(Exception):
    """Root of the tree above.

    `code` names the reason, "" for errors of others that give none; `settings` has the dotted
    names of the settings that it is about, () where none is known.
    """

    def __init__(self, *args: object, code: str = "", settings: Iterable[str] = ()) -> None:
        super().__init__(*args)
        self.code = code
        self.settings = tuple(settings)


class SettingError(TreegraftError, ValueError):
    """A recipe or an override is wrong."""


class DataError(TreegraftError, ValueError):
    """Tasks, a corpus or a record cannot be used."""


class ModelError(TreegraftError, ValueError):
    """A model or its tokenizer is missing, incomplete or does not fit."""


class CheckpointError(TreegraftError, ValueError):
    """A checkpoint or run folder is damaged, foreign or in the way."""


class ToolError(TreegraftError, RuntimeError):
    """A tool call failed because of the agent's request; its text becomes the observation."""


class ToolUnavailable(ToolError):
    """The service behind a tool failed; the leaf gets `Status.FAILED` and leaves its group."""


class EngineError(TreegraftError, RuntimeError):
    """An engine died, lost a request or was asked for what it cannot do."""


class KernelError(TreegraftError, RuntimeError):
    """Our own kernels cannot be made or loaded on this machine."""


class RankError(TreegraftError, RuntimeError):
    """A process that learns with others has ended, hangs, or is not like them."""


class StorageError(TreegraftError, RuntimeError):
    """Files could not be written or read: the disk is full, the folder is read-only."""


class DeadlineExceeded(TreegraftError, TimeoutError):
    """A wait of ours ran out."""


class DriftError(TreegraftError, RuntimeError):
    """Engine and learner no longer hold the same policy."""


@contextlib.contextmanager
def first_cause() -> Iterator[None]:
    """Raises, in place of a group of tasks that failed together, the first error of ours in it."""
    try:
        yield
    except BaseExceptionGroup as group:
        # The reader wants the cause.
        # Ours, since the others were most often cancelled by its failure.
        cause: BaseException | None = group.split(TreegraftError)[0]
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        if cause is None:
            raise
        # Its own cause says more than the group.
        raise cause from cause.__cause__ or group


_OF_ALLOCATORS = ("can't allocate memory", "not enough memory", "out of memory")
"""In the texts of torch's errors, whose class for CPUs is RuntimeError."""


def memory_fault(error: BaseException) -> str:
    """Returns what an error says that memory has run out with, on one line; "" for another."""
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(memory_fault, error.exceptions)), "")
    text = " ".join(str(error).split())
    is_one = isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(one in text.lower() for one in _OF_ALLOCATORS)
    )
    return (text or type(error).__name__)[:300] if is_one else ""


@contextlib.contextmanager
def about(*settings: str) -> Iterator[None]:
    """Lets errors from inside that know no setting be about these."""
    try:
        yield
    except TreegraftError as error:
        error.settings = error.settings or settings
        raise


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns " Did you mean 'x'?" for the known name nearest to `name`, whatever the case of its
    letters, or an empty string where none is near."""
    # Of names that differ in case alone the first is taken.
    names = {one.casefold(): one for one in reversed(list(known))}
    # 0.5 finds "hashin" and "qestion", and no word of another meaning.
    matches = difflib.get_close_matches(name.casefold(), names, n=1, cutoff=0.5)
    return f" Did you mean '{names[matches[0]]}'?" if matches else ""


def nearest_file(path: Path) -> str:
    """Returns what `nearest` says of a path with nothing there, among the names in its folder; that
    its folder is not there or empty, where it is so."""
    inside = [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else []
    absent = f" The folder '{path.parent}' does not exist or is empty."
    return nearest(path.name, inside) if inside else absent
