"""Siblings of finished steps that begin with forced tokens: a thought that is kept, and the opening
of a tool call or an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from treegraft.core.errors import SettingError
from treegraft.core.interfaces import AnswerOpening, Explorer, Format, Opening
from treegraft.core.sessions import Point
from treegraft.core.types import ROOT_ID, Cause, Retry, RetryCause, Start
from treegraft.rollout.limits import MIN_ROOM, Limits
from treegraft.rollout.tree import OpenPath, OpenTree


class Retries:
    """Opens them in one tree."""

    def __init__(
        self,
        tree: OpenTree,
        format: Format,
        limits: Limits,
        ends: Mapping[str, OpenPath],
        begin: Callable[[], Point],
    ) -> None:
        """Args:
        ends: the paths that stand below finished steps, by the step above them.
        begin: returns the beginning of one more rollout at the prompt.
        """
        self._tree, self._format, self._limits = tree, format, limits
        self._ends, self._begin = ends, begin

    def open(self, proposals: Sequence[Retry]) -> list[tuple[OpenPath, Cause]]:
        """Returns the paths that the budget grants, and why; none beside a step whose opening
        leaves no room, or whose state cannot be had again."""
        found: list[tuple[OpenPath, Cause]] = []
        for one in proposals:
            cause = RetryCause(rule=one.rule, beside=one.step_id)
            found += [(path, cause) for path in self._beside(one)]
        return found

    def _beside(self, retry: Retry) -> list[OpenPath]:
        tree = self._tree
        step = tree.steps_to(retry.step_id)[-1]
        if retry.opens == "answer":
            assert isinstance(self._format, AnswerOpening), "checked when the grower was made"
            opening = self._format.answer_opening(step.written_ids)
        else:
            assert isinstance(self._format, Opening), "checked when the grower was made"
            opening = self._format.call_opening(step.written_ids, retry.tool)
        above = None if step.parent == ROOT_ID else self._ends.get(str(step.parent))
        if above is None and step.parent != ROOT_ID:
            return []
        used = len(opening) + (0 if above is None else above.num_used)
        if self._limits.max_completion_tokens - used < MIN_ROOM:
            return []
        num = tree.budget.grant(Start(retry.num))
        if above is None:
            paths = [tree.open_path(self._begin()) for _ in range(num)]
        else:
            if above.point is not None:
                above.point.reserve(num)
            paths = [above.copy() for _ in range(num)]
        for path in paths:
            path.opening, path.is_lesson = opening, retry.is_lesson
        return paths


def check_retries(explorer: Explorer, format: Format) -> None:
    """Raises SettingError where the explorer begins tool calls or answers and the format cannot."""
    if explorer.retries and not isinstance(format, Opening):
        raise SettingError(
            f"explore.explorers: {type(explorer).__name__} begins tool calls for the agent, but the"
            f" format {type(format).__name__} has no method call_opening; expected a format with"
            " one, as 'tags' and 'chat' are. Write it, or choose another explorer."
        )
    if explorer.begins_answers and not isinstance(format, AnswerOpening):
        raise SettingError(
            f"explore.explorers: {type(explorer).__name__} begins answers for the agent, but the"
            f" format {type(format).__name__} has no method answer_opening; expected a format with"
            " one, as 'tags' is. Choose another, or leave that out (explore.commit.answers=false)."
        )
