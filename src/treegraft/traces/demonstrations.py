"""Demonstrations for the warm-up and lessons: the trajectories of a Step-Trace Buffer or of a JSONL
file, all of them or the best rewarded."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from treegraft.assemble import Parts
from treegraft.core.demonstration import Demonstration
from treegraft.core.errors import DataError, about
from treegraft.core.types import StepContent, Task, Trace
from treegraft.policy.learn.lessons import Lesson, LessonBook
from treegraft.policy.learn.sft import demonstration_tree, few_unfit
from treegraft.settings.config import Config
from treegraft.settings.policy import WarmupSettings
from treegraft.traces.buffer import TraceBuffer
from treegraft.traces.imports import ImportReport, check_paths, read_file
from treegraft.traces.keys import OTHER_TASKS, read_trajectory
from treegraft.traces.rollout_buffer import OWN, BufferOrigin, RolloutBuffer, place_of_own

SQLITE = b"SQLite format 3\x00"
"""The first bytes of a Step-Trace Buffer."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A trajectory of a file."""

    task: Task
    steps: tuple[StepContent, ...]
    reward: float | None
    """None where the file has none."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The trajectories that the warm-up imitates."""

    demonstrations: list[Demonstration]
    left_out: str
    """How many were left out and why, as the end of a sentence; empty for none."""

    def checksum(self) -> str:
        """Returns a checksum of the demonstrations in their order."""
        digest = hashlib.blake2b(digest_size=16)
        for one in self.demonstrations:
            digest.update(repr(one).encode(errors="surrogatepass"))
        return digest.hexdigest()


def read_demonstrations(
    path: Path, settings: WarmupSettings, tasks: Sequence[Task], *, has_environment: bool = False
) -> Chosen:
    """Returns the trajectories of a Step-Trace Buffer or a JSONL file that [warmup] asks for.

    Of a buffer, those of `tasks` whose steps are all there: a trajectory with a step missing or
    stored as text alone, or without an answer at its end, is left out. They are in the order of
    source, task and name, and of a file in that of its lines; with warmup.num_best, task by task
    and the best first.

    Args:
        tasks: those that the trajectories of a buffer may be of; a file has its own questions.
        has_environment: of the tasks: a trajectory then may end without an answer, and its question
            is the environment's first observation, as stored.

    Raises:
        DataError: the file cannot be read, a row lacks a reward that is asked for, or no trajectory
            is left.
    """
    reasons: Counter[str] = Counter()
    if _is_buffer(path):
        found = list(_of_buffer(path, tasks, has_environment, reasons))
    else:
        found = _of_file(path, reasons)
    num_found = len(found) + reasons.total()
    kept = _best(found, path, settings, reasons)
    left_out = _counted(reasons)
    if not kept:
        advice = "Name another file"
        if OTHER_TASKS in reasons:
            advice += ", or take the tasks and the run.seed that it was built with"
        counted = f"none of its {num_found} trajectories can be imitated ({left_out}). {advice}."
        raise DataError(
            f"warmup.traces '{path}': {counted if num_found else 'it is empty.'}",
            code="no-demonstration",
        )
    return Chosen([(one.task, one.steps) for one in kept], left_out)


def _counted(reasons: Counter[str]) -> str:
    return "; ".join(f"{count} {reason}" for reason, count in reasons.items())


def _best(
    found: Sequence[Stored], path: Path, settings: WarmupSettings, reasons: Counter[str]
) -> list[Stored]:
    """The best trajectories of each question."""
    num_best = settings.num_best
    if num_best is None:
        return list(found)
    groups: dict[str, list[tuple[float, Stored]]] = {}
    for one in found:
        if one.reward is None:
            raise DataError(
                f"warmup.traces '{path}', {one.task.id}: got no reward, which warmup.num_best"
                ' needs; add a number "reward" to each line.',
                code="demonstration-without-reward",
            )
        # By the whole conversation: many end with one question, such as "And then?".
        groups.setdefault(repr(one.task.conversation()), []).append((one.reward, one))
    kept: list[Stored] = []
    for group in groups.values():
        # Sorting preserves the order of the file among equals.
        group.sort(key=lambda item: (-item[0], len(item[1].steps)))
        kept += [one for _, one in group[:num_best]]
    if surplus := len(found) - len(kept):
        reasons[f"not among the warmup.num_best = {num_best} of its question"] += surplus
    return kept


def _is_buffer(path: Path) -> bool:
    with about("warmup.traces"):
        check_paths([path])
    if path.is_dir():
        return False
    with path.open("rb") as file:
        return file.read(len(SQLITE)) == SQLITE


# ---------------------------------------------------------------------- buffers


def _of_buffer(
    path: Path, tasks: Sequence[Task], has_environment: bool, reasons: Counter[str]
) -> Iterator[Stored]:
    # As it was built: trajectories are read without their vectors, so no encoder is needed.
    with TraceBuffer.open_as_built(path) as buffer:
        yield from _of_traces(buffer.trajectories(), tasks, has_environment, reasons)


def lesson_book(config: Config, held: RolloutBuffer, parts: Parts) -> LessonBook | None:
    """Returns the lessons of a run, see `book_of`; None where it has none, or its buffer is not
    built yet.

    Raises:
        DataError: there is none.
    """
    # Reading all trajectories would cost a run without lessons seconds.
    if not config.loss.lesson_coef:
        return None
    if held.buffer is not None:
        return book_of(config, held.buffer, held.origin, parts)
    if held.is_due and not held.file.exists():
        return None
    with TraceBuffer.open_as_built(held.file) as buffer:
        return book_of(config, buffer, held.origin, parts)


def book_of(config: Config, buffer: TraceBuffer, origin: BufferOrigin, parts: Parts) -> LessonBook:
    """Returns the lessons of a buffer: for each task the trajectory with the best reward above 0,
    of these the one with the fewest steps, of these the first.

    The agent's own traces are left out, since they change as it learns, unless the buffer holds
    nothing else: then they are the lessons, and `add_lessons` adds those of each update.

    Raises:
        DataError: there is none.
    """
    book = LessonBook(num_earlier=config.learn.num_lessons, seed=config.run.seed)
    if origin == "self":
        # As they came, so that of equals a resumed run keeps the same one.
        wanted = sorted(buffer.trajectories(), key=place_of_own)
    else:
        wanted = [traces for traces in buffer.trajectories() if traces[0].source != OWN]
    reasons = add_lessons(book, wanted, parts)
    if book.is_empty and origin != "self":
        left_out = _counted(reasons)
        raise DataError(
            f"loss.lesson_coef: the buffer '{buffer.path}' has no success at the training tasks"
            f" ({left_out or 'none that this format can say'}); name another buffer.",
            code="no-lesson",
        )
    return book


def add_lessons(
    book: LessonBook, trajectories: Iterable[tuple[Trace, ...]], parts: Parts
) -> Counter[str]:
    """Adds trajectories that are lessons to the book, and returns how many are none, by reason."""
    reasons: Counter[str] = Counter()
    for one in _of_traces(trajectories, parts.train_tasks, parts.kind is not None, reasons):
        # Imitating what did not pay would teach it.
        if (reward := one.reward or 0.0) <= 0:
            reasons["with a reward not above 0"] += 1
            continue
        # A step of another agent may be nothing that this format can say.
        with suppress(ValueError):
            book.add(Lesson(demonstration_tree(parts.format, one.task, one.steps), reward))
    return reasons


def _of_traces(
    trajectories: Iterable[tuple[Trace, ...]],
    tasks: Sequence[Task],
    has_environment: bool,
    reasons: Counter[str],
) -> Iterator[Stored]:
    by_id = {task.id: task for task in tasks}
    for traces in trajectories:
        found = read_trajectory(traces, by_id, has_environment=has_environment)
        if isinstance(found, str):
            reasons[found] += 1
        else:
            yield Stored(*found, traces[0].reward)


# ---------------------------------------------------------------------- files


def _of_file(path: Path, reasons: Counter[str]) -> list[Stored]:
    """What `buffer import` reads, with the rows' own questions; a reward may be left out."""
    report = ImportReport()
    found: list[Stored] = []
    for one in read_file(path, report):
        if all(one.is_kept):
            asked = Task(id=f"line {one.line}", question=one.question, reference=())
            task = replace(asked, messages=one.messages)
            found.append(Stored(task, one.contents, one.reward))
        else:
            reasons["with a step of another agent's, or one that leads nowhere"] += 1
    if problems := [f"line {one.line}: {one.reason}" for one in report.problems]:
        num_rows = len(found) + reasons.total() + len(problems)
        reasons[few_unfit(path, problems, num_rows, "cannot be read")] += len(problems)
    return found
