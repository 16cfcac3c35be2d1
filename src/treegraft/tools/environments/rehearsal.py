"""Other agents' calls are made in an environment before they are believed: in grafts and in
demonstrations."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from treegraft.core.demonstration import Demonstration
from treegraft.core.errors import DataError, ToolUnavailable
from treegraft.core.sessions import Session, SessionOpener, Untrue
from treegraft.core.types import Observation, StepContent, Task, ToolCall
from treegraft.tools.environments.own import ended

MAX_CONCURRENT = 16
"""Demonstrations under way at once."""

Calls = tuple[ToolCall, ...]


@dataclass(slots=True)
class Counts:
    """What environments count between two reports; the fields are metrics."""

    num_opened: int = 0
    num_forks: int = 0
    num_copies: int = 0
    """Copies made, those that no branch took included: a matter of timing."""
    num_replays: int = 0
    num_replayed_calls: int = 0
    num_mismatches: int = 0
    num_failures: int = 0
    num_rehearsals: int = 0
    num_graft_tries: int = 0
    num_graft_calls: int = 0
    num_untrue_grafts: int = 0


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """A demonstration as an environment shows it."""

    task: Task
    """With the first observation, as rollouts have it."""
    contents: tuple[StepContent, ...]
    """With the results that came; up to a fault as the demonstration has them."""
    reward: float | None = None
    """Of the state at the end; None without one, and after a fault."""
    fault: str = ""
    """Why it cannot be shown, as the end of a sentence that names the task; empty for none."""


async def rehearse_all(
    opener: SessionOpener, demonstrations: Sequence[Demonstration]
) -> list[Rehearsed]:
    """Returns demonstrations, each played in a fresh environment, in their order."""
    gate = asyncio.Semaphore(MAX_CONCURRENT)

    async def play(task: Task, contents: Sequence[StepContent]) -> Rehearsed:
        async with gate, opener.sessions(task) as sessions:
            try:
                shown = await sessions.prepare(1)
                session = await sessions.start(0).open()
                enacted = await session.enact(contents)
                return Rehearsed(shown, enacted, await session.reward())
            except (Untrue, ToolUnavailable) as error:
                return Rehearsed(task, tuple(contents), fault=str(error))

    return list(await asyncio.gather(*(play(*one) for one in demonstrations)))


async def show(
    opener: SessionOpener, demonstrations: Sequence[Demonstration]
) -> list[Demonstration]:
    """Returns demonstrations as environments show them, with the first observation and the results
    that come.

    Raises:
        DataError: one that an environment contradicts, by task and call.
    """
    found = await rehearse_all(opener, demonstrations)
    for one in found:
        if one.fault:
            raise DataError(
                f"the demonstration of task '{one.task.id}' is not what its environment shows:"
                f" {one.fault}. Correct expert(), or the environment where that is wrong.",
                code="demonstration-untrue",
            )
    return [(one.task, one.contents) for one in found]


async def enacted(
    session: Session, contents: Sequence[StepContent], names: Collection[str]
) -> tuple[StepContent, ...]:
    """Returns a demonstration with the results that come in the session.

    Args:
        names: the environment's own tools; calls of others are made only where the demonstration
            has no result.

    Raises:
        Untrue: a result differs, or a call without one is an error.
        ToolUnavailable: the environment failed.
    """
    steps = []
    number = 0
    total = sum(len(content.calls) for content in contents)
    for content in contents:
        results = list(content.observations)
        for place, call in enumerate(content.calls):
            number += 1
            seen = results[place] if place < len(results) else None
            if seen is not None and call.name not in names:
                continue
            came = await session.call(call)
            # An error that nobody wrote down is a mistake of the demonstration.
            if came.is_error if seen is None else came.text not in (seen.text, ended(seen.text)):
                expected = "no error" if seen is None else f"{seen.text!r:.200} as it has it"
                raise Untrue(
                    f"call {number} of {total}, {call.name} {call.body.strip()!r:.80}, gave"
                    f" {came.text!r:.200}; expected {expected}"
                )
            results[place : place + 1] = [came]
        steps.append(replace(content, observations=tuple(results)))
    return tuple(steps)


async def first_true(
    candidates: Sequence[Sequence[str | StepContent]],
    names: Collection[str],
    counts: Counts,
    open_copy: Callable[[], Awaitable[Session]] | None,
) -> tuple[int, Session | None] | None:
    """Returns the number of the first candidate whose results come true, and the copy in which its
    calls have been made, None for one without calls; None where no candidate comes true.

    Args:
        names: the environment's tools.
        open_copy: opens a session in the present state; None where that cannot be had again.
    """
    known: dict[Calls, str] = {}
    """Of calls one after another: the result of the last."""
    for number, values in enumerate(candidates):
        told = _told(values, names)
        # Nothing to try, so nothing can be untrue.
        if told == []:
            return number, None
        if told is None or open_copy is None:
            continue
        counts.num_graft_tries += 1
        calls = tuple(call for call, _ in told)
        begun = [calls[:count] for count in range(1, len(calls) + 1)]
        seen = {made: one.text for made, (_, one) in zip(begun, told, strict=True)}
        # A copy is made only if no result so far contradicts the candidate.
        if any(known.get(made, text) != text for made, text in seen.items()):
            continue
        trial = await open_copy()
        for made in begun:
            counts.num_graft_calls += 1
            # For the next candidates: they often begin with the same call.
            known[made] = (await trial.call(made[-1])).text
            if known[made] != seen[made]:
                trial.release()
                break
        else:
            counts.num_rehearsals += 1
            return number, trial
    counts.num_rehearsals += 1
    counts.num_untrue_grafts += 1
    return None


def _told(
    values: Sequence[str | StepContent], names: Collection[str]
) -> list[tuple[ToolCall, Observation]] | None:
    """The environment's calls in another agent's steps with their results; None where that cannot
    be known, as of a text."""
    told: list[tuple[ToolCall, Observation]] = []
    for value in values:
        if isinstance(value, str):
            return None
        for call, observation in zip_longest(value.calls, value.observations):
            if call is not None and call.name in names:
                if observation is None:
                    return None
                told.append((call, observation))
    return told
