"""One environment begun, copied and asked for its reward on one task, before a run needs it."""

from __future__ import annotations

from dataclasses import dataclass

from treegraft.core.errors import SettingError, ToolUnavailable
from treegraft.core.interfaces import Capability, EnvironmentKind
from treegraft.core.sessions import SessionOpener
from treegraft.core.types import Task


@dataclass(frozen=True, slots=True)
class Trial:
    """What an environment showed at the beginning of a task."""

    task_id: str
    tools: tuple[str, ...]
    """Names of the agent's tools."""
    capability: Capability
    first: str
    """The first observation; empty for none."""
    reward: float | None
    """Of the beginning; None without one."""
    shown: Task
    """The task as the environment begins it: with the first observation."""


async def try_environment(
    kind: EnvironmentKind,
    environments: SessionOpener,
    task: Task,
    *,
    branches: bool,
    needs_reward: bool,
) -> Trial:
    """Returns what an environment shows at the beginning of a task.

    Args:
        branches: trees branch or graft, so that its state has to be had twice.
        needs_reward: nothing else rewards a trajectory.

    Raises:
        SettingError: reset, the copy or the reward failed, or there is no reward where one is
            needed.
    """
    async with environments.sessions(task) as sessions:
        try:
            shown = await sessions.prepare(1)
            session = await sessions.start(0).open()
            if branches:
                point = session.mark()
                point.reserve(1)
                branch = await point.open()
            reward = await session.reward()
            if branches:
                await branch.reward()
        except ToolUnavailable as error:
            raise SettingError(
                f"environment.kind: tried on task '{task.id}': {error}. Correct the method that"
                " it names, or the columns of the data.",
                code="environment-trial-failed",
            ) from error
    if needs_reward and reward is None:
        raise SettingError(
            f"environment.kind: tried on task '{task.id}', '{kind.name}' gives no reward at the"
            " beginning: get_reward() returned None, and reward.funcs names nothing else. A"
            " trajectory without a call would have none; return a number, or add a function.",
            code="environment-no-first-reward",
        )
    first = "" if shown is task else shown.question[len(task.question) :].lstrip("\n")
    names = tuple(tool.name for tool in kind.tools)
    return Trial(task.id, names, kind.capability, first, reward, shown)
