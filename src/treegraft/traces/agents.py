"""Agents that fill the Step-Trace Buffer, and what agents of extensions read steps by. A failed
attempt is data, never an exception."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from treegraft.assemble import Parts
from treegraft.core.demonstration import solution
from treegraft.core.interfaces import TaskSource
from treegraft.core.keyed import keyed_int
from treegraft.core.sessions import Session, SessionOpener
from treegraft.core.types import ParsedStep, StepContent, Task
from treegraft.rollout.formats.markup import (
    Violation,
)
from treegraft.rollout.formats.tags import RESULT, TagsFormat
from treegraft.rollout.formats.template import MARK, THINK_CLOSING, THINK_OPENING
from treegraft.rollout.formats.turns import TurnFormat, message_of, tool_schema
from treegraft.tools.environments.rehearsal import rehearse_all

__all__ = [
    "MARK",
    "RESULT",
    "THINK_CLOSING",
    "THINK_OPENING",
    "Agent",
    "Attempt",
    "ParsedStep",
    "Parts",
    "ScriptedAgent",
    "Session",
    "SessionOpener",
    "TagsFormat",
    "TurnFormat",
    "Violation",
    "message_of",
    "tool_schema",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Attempt(contents=(StepContent(calls=(ToolCall("search", "e9 r2"),), ...),
    StepContent(answer="e41")))"""

    contents: tuple[StepContent, ...] = ()
    """The steps in order, results included; the last one has the answer. Of a failed attempt, the
    steps up to the failure."""
    error: str | None = None
    """Reason of the failure, in words that other failures of the kind share; None for an attempt
    that ended in an answer."""
    is_outage: bool = False
    """The agent could not be reached, so that the next attempt will probably fail too."""
    environment_reward: float | None = None
    """Of its environment, at the end; None without one."""
    question: str | None = None
    """With the environment's first observation; None for the task's own."""
    refused: str | None = None
    """The reply that has neither a call nor an answer, as it was sent; None for none."""
    num_requests: int = 0
    """Replies of a server."""
    num_tokens: tuple[int, int] = (0, 0)
    """Of its requests and of its replies, as the server counts them; 0 where it does not."""


class Agent(Protocol):
    """Answers tasks, each attempt apart from the others."""

    source: str
    """Its name in the buffer."""

    async def solve(self, task: Task, sample: int) -> Attempt:
        """Returns the attempt of number `sample`, 0, 1, ...; failures are data on it."""

    async def close(self) -> None: ...


class ScriptedAgent:
    """The scripted expert of a task source."""

    def __init__(
        self,
        tasks: TaskSource,
        *,
        seed: int,
        source: str = "expert",
        environments: SessionOpener | None = None,
    ) -> None:
        """Args:
        seed: together with task and sample, the seed of the expert's own choices.
        environments: where its calls are made; None where the tasks have no environment.
        """
        self.source = source
        self._tasks = tasks
        self._environments = environments
        self._seed = seed

    def steps(self, task: Task, sample: int) -> tuple[StepContent, ...] | None:
        """Returns the expert's solution as it is written; None for tasks that have none."""
        return solution(self._tasks, task, keyed_int(self._seed, "expert", task.id, sample))

    async def solve(self, task: Task, sample: int) -> Attempt:
        """Returns the expert's solution; failed for tasks that have none, and where the
        environment has other results."""
        contents = self.steps(task, sample)
        if not contents:
            return Attempt(error="there is no scripted expert for the task")
        # Its observations are those of the tasks' own tools, as written.
        if self._environments is None:
            return Attempt(contents=contents)
        (one,) = await rehearse_all(self._environments, [(task, contents)])
        if one.fault:
            return Attempt(contents=contents, error="the environment contradicts the expert")
        question = one.task.question
        return Attempt(contents=one.contents, environment_reward=one.reward, question=question)

    async def close(self) -> None:
        """Has nothing to close."""
