"""Shares of a tree's leaves, as defaults of settings; explorers that use a share first; and how
steps are begun anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from treegraft import Origin, Step, Trajectory
from treegraft.parts import Independent, Start, value_of


def half_the_leaves(config: Any) -> int:
    """Returns half of explore.num_leaves, at least 1."""
    return max(1, int(value_of(config, "explore.num_leaves")) // 2)


def quarter_of_the_leaves(config: Any) -> int:
    """Returns a quarter of explore.num_leaves, at least 1."""
    return max(1, int(value_of(config, "explore.num_leaves")) // 4)


def marks_answers(config: Any) -> bool:
    """Returns whether the format has a mark that begins an answer."""
    return bool(value_of(config, "format.kind") != "chat")


class StartsFirst(Independent):
    """An explorer that begins `num_starts` rollouts at the prompt, and opens siblings of finished
    steps with the leaves that are left."""

    expands = True
    retries = True

    def __init__(self, settings: Any) -> None:
        self._settings = settings

    def starts(self, max_leaves: int) -> Start:
        """Returns the first-level rollouts, at most `max_leaves`."""
        return Start(min(int(self._settings.num_starts), max_leaves))


def is_own(step: Step) -> bool:
    """Returns whether the policy wrote the step, in its format."""
    return step.origin is Origin.POLICY and not step.violation


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns the first place at which two steps differ, the shorter one's length where it is the
    beginning of the other."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def openings(
    step: Step, members: Sequence[Trajectory], kind: Literal["call", "answer"], tool: str
) -> Iterator[tuple[int, ...]]:
    """Returns different beginnings of the tree's own steps of a kind, up to the first token that is
    not the one of `step`, those after the most results first.

    Args:
        tool: whose calls alone count; empty for any.
    """
    steps = {one.id: one for path in members for one in path.steps[1:] if is_own(one)}
    seen = set[tuple[int, ...]]()
    for one in sorted(steps.values(), key=lambda one: (-one.depth, one.ordinals)):
        calls, written = one.content.calls, one.written_ids
        is_call = bool(calls) and (not tool or calls[0].name == tool)
        if not (is_call if kind == "call" else one.content.answer is not None):
            continue
        num = first_difference(step.written_ids, written)
        if num < len(written) and (opening := written[: num + 1]) not in seen:
            seen.add(opening)
            yield opening
