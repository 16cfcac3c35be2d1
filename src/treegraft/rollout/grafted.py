"""A retrieved step as it is attached: cut to the room that there is, with what can be learned of
it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from treegraft.core.interfaces import Format, Retrieved
from treegraft.core.types import GraftCause, Origin, StepContent
from treegraft.rollout.limits import MIN_ROOM


class Grafted(NamedTuple):
    """What a graft adds to a tree."""

    token_ids: tuple[int, ...]
    content: StepContent
    cause: GraftCause
    lesson_ids: tuple[int, ...]


def grafted(found: Retrieved, format: Format, room: int) -> Grafted | None:
    """Returns the retrieved steps as one graft; None where they do not fit.

    Args:
        room: tokens that the trajectory has left.
    """
    values = found.values
    token_ids = format.render_graft(values)
    num_whole = len(token_ids)
    if room - num_whole < MIN_ROOM:
        # Half of the room, from the left: the end of a result is nearest to its answer, and the
        # agent needs the other half to use it.
        if room // 2 - len(format.render_graft([])) < MIN_ROOM:
            return None
        token_ids = format.render_graft(values, max_tokens=room // 2)
    first = found.traces[0]
    cause = GraftCause(
        source=first.source,
        task_id=found.task_id or first.task_id,
        reward=first.reward,
        similarity=found.similarity,
        content_hash=first.content_hash,
        num_cut=num_whole - len(token_ids),
    )
    only = values[0] if len(values) == 1 else None
    content = only if isinstance(only, StepContent) else StepContent(thought=_as_text(values))
    lesson: list[int] = []
    # Nothing is taught of a graft that was cut: the agent was not shown the whole of it.
    if content is only and not cause.num_cut:
        with suppress(ValueError):  # a step that the policy could not have written
            for ids, origin in format.render_step(content):
                lesson += ids if origin is Origin.POLICY else ()
    return Grafted(token_ids, content, cause, tuple(lesson))


def _as_text(values: Sequence[str | StepContent]) -> str:
    """Several steps as one text, for the record."""
    lines: list[str] = []
    for value in values:
        if isinstance(value, str):
            lines.append(value)
            continue
        calls = [f"{call.name} {call.body}" for call in value.calls]
        seen = [observation.text for observation in value.observations]
        lines += filter(None, [value.thought, *calls, *seen, value.answer])
    return "\n".join(lines)
