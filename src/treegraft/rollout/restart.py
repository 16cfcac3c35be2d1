"""Rollouts that begin below steps of a stored trajectory of the same task, with the environment in
the state after them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from treegraft.core.errors import ToolUnavailable
from treegraft.core.interfaces import Format, Retriever, Rewriting
from treegraft.core.sessions import Point, Session, Sessions, Untrue
from treegraft.core.types import (
    Below,
    Cause,
    Origin,
    RestartCause,
    Status,
    StepContent,
    Stored,
    StoredCause,
    Trace,
)
from treegraft.rollout.limits import MIN_ROOM, Limits
from treegraft.rollout.tree import OpenPath, OpenTree

_Found = TypeVar("_Found")
_log = logging.getLogger(__name__)

_NOTHING = Stored(num_steps=0, has_answer=False, reward=0.0, source="")


@dataclass(frozen=True, slots=True)
class _Step:
    """A stored step as the policy would have written it."""

    content: StepContent
    token_ids: tuple[int, ...]
    own_ids: tuple[int, ...]
    """Those of them that its agent wrote."""


class StoredSteps:
    """The stored trajectories of one tree's task."""

    def __init__(self, tree: OpenTree, sessions: Sessions, format: Format, limits: Limits) -> None:
        """Begins without any."""
        self._tree = tree
        self._sessions = sessions
        self._format = format
        self._limits = limits
        self._usable: list[tuple[Sequence[Trace], list[_Step], Stored]] = []

    async def find(self, retriever: Retriever) -> None:
        """Looks up the trajectories; there are none if that fails or takes longer than the deadline
        of a rollout."""
        found = await self.in_time(retriever.trajectories(self._tree.task))
        for traces in found or ():
            own = list(self._rendered([trace.value for trace in traces]))
            self._usable.append((traces, own, self._size(traces, own)))

    @property
    def stored(self) -> tuple[Stored, ...]:
        """What an explorer sees of them, in their order."""
        return tuple(size for _, _, size in self._usable)

    def _rendered(self, values: Sequence[str | StepContent]) -> Iterator[_Step]:
        """The steps up to the first that the policy could not have written."""
        for value in values:
            if isinstance(value, str):
                return
            try:
                spans = self._format.render_step(value)
            except ValueError:
                return
            token_ids: list[int] = []
            own_ids: list[int] = []
            for ids, origin in spans:
                token_ids += ids
                own_ids += ids if origin is Origin.POLICY else ()
            form = self._format
            # Below them it is history, in which there may be no thoughts.
            if value.observations and isinstance(form, Rewriting) and form.drops_thoughts:
                seen = form.context_spans(own_ids, value.observations)
                token_ids = [token for ids, _ in seen for token in ids]
            yield _Step(value, tuple(token_ids), tuple(own_ids))

    def _size(self, traces: Sequence[Trace], steps: Sequence[_Step]) -> Stored:
        limit = self._limits.max_completion_tokens
        num_tokens = num_steps = num_called = 0
        for step in steps:
            num_tokens += len(step.token_ids)
            # A call without its result is not a place from which an agent could go on.
            if step.content.answer is not None or not step.content.observations:
                break
            num_called += 1
            num_steps += num_tokens + MIN_ROOM <= limit
        is_whole = len(steps) == len(traces) == num_called + 1
        return Stored(
            num_steps=num_steps,
            has_answer=is_whole and steps[-1].content.answer is not None and num_tokens <= limit,
            reward=traces[0].reward,
            source=traces[0].source,
        )

    def _drop(self, number: int) -> None:
        traces, steps, _ = self._usable[number]
        self._usable[number] = (traces, steps, _NOTHING)
        _log.info("task '%s': its environment contradicts a stored trajectory", self._tree.task.id)

    async def open(self, below: Below, num: int) -> list[tuple[OpenPath, Cause]] | None:
        """Returns `num` paths that stand below stored steps, and why; none of them for a whole
        stored trajectory, which becomes a leaf. None where there are no such steps, where the
        environment contradicts them, or where that failed or took longer than the deadline."""
        return await self.in_time(self._opened(below, num))

    async def in_time(self, work: Awaitable[_Found]) -> _Found | None:
        """Returns what comes of it within the deadline of a rollout; None for a failure, which is
        logged: the tree then grows from the prompt."""
        deadline_s = self._limits.deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                return await work
        except Exception as error:
            reason = str(error) or f"no end within rollout.deadline_s = {deadline_s} s"
            _log.warning(
                "task '%s': stored trajectories are left out: %s: %s",
                self._tree.task.id,
                type(error).__name__,
                reason,
            )
            return None

    async def _opened(self, below: Below, num: int) -> list[tuple[OpenPath, Cause]] | None:
        _, steps, size = self._usable[below.stored]
        count = below.num_steps
        if count is None:
            return [] if num == 1 and await self._attach(below.stored) else None
        if not 1 <= count <= size.num_steps:
            return None
        # First the environment: results that differ make the stored steps untrue here.
        found = await self._enacted(below.stored, steps[:count])
        if found is None:
            return None
        session, shown = found
        try:
            if not session.can_branch:
                return None
            # Kept: each rollout takes a copy or a replay of its own.
            point = session.mark()
            # Before the first rollout ends and could be the last to need the state.
            point.reserve(num)
            path = self._appended(below.stored, shown, point)
            cause = RestartCause(rule=below.rule, num_steps=count)
            return [(one, cause) for one in path.copies(num)]
        finally:
            session.release()

    async def _attach(self, number: int) -> bool:
        """Makes a whole stored trajectory a leaf of the tree; returns whether that could be
        done."""
        _, steps, size = self._usable[number]
        found = await self._enacted(number, steps) if size.has_answer else None
        if found is None:
            return False
        session, shown = found
        try:
            reward = await session.reward()
        except ToolUnavailable:
            return False
        finally:
            session.release()
        path = self._appended(number, shown, None, is_taught=True)
        # Another trajectory with the same tokens is that leaf.
        if self._tree.has_leaf(path.parent):
            return False
        answer = self._format.answer_of(shown[-1].content, self._tree.task)
        self._tree.end_path(path, Status.COMPLETED, answer)
        self._tree.reward_path(path, reward)
        return True

    async def _enacted(
        self, number: int, steps: Sequence[_Step]
    ) -> tuple[Session, list[_Step]] | None:
        """A session in the state after the steps, and these with the results that came; None where
        others came."""
        # Behind the ordinals of the rollouts that begin at the prompt, whose environments may have
        # begun.
        point = self._sessions.start(self._limits.num_leaves)
        try:
            session = await point.open()
        except ToolUnavailable:
            return None
        contents = [step.content for step in steps]
        try:
            came = await session.enact(contents)
        except (Untrue, ToolUnavailable) as error:
            session.release()
            if isinstance(error, Untrue):
                self._drop(number)
            return None
        # A deadline too, which cancels the wait.
        except BaseException:
            session.release()
            raise
        shown = list(steps) if list(came) == contents else list(self._rendered(came))
        num_tokens = sum(len(step.token_ids) for step in shown)
        # Results that say the same in more words may leave no room.
        room = self._limits.max_completion_tokens - num_tokens
        is_whole = steps[-1].content.answer is not None
        if len(shown) < len(steps) or room < (0 if is_whole else MIN_ROOM):
            session.release()
            return None
        return session, shown

    def _appended(
        self, number: int, steps: Sequence[_Step], point: Point | None, *, is_taught: bool = False
    ) -> OpenPath:
        """A path below the steps, which the tree then has."""
        traces, _, _ = self._usable[number]
        tree = self._tree
        path = tree.open_path(point)
        for trace, step in zip(traces, steps, strict=False):
            cause = StoredCause(
                source=trace.source, reward=trace.reward, content_hash=trace.content_hash
            )
            lesson = step.own_ids if is_taught else ()
            temperature = self._limits.temperature
            tree.add_stored(path, step.token_ids, step.content, cause, lesson, temperature)
        return path
