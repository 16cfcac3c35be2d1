"""Environments of the package verifiers (its v1) in which one agent talks with a game or a
simulated user.

Such an environment runs itself and wants one message after another from its agent. Here its agent
is a stand-in that waits for the messages that the trajectory sends through a tool. All environments
share one thread with an event loop of its own, since games may block theirs.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

from pydantic import Field

from treegraft import DataError, SettingError, Task, ToolError, ToolUnavailable
from treegraft.parts import EnvironmentSettings, EnvironmentTool, Settings, interfaces

T = TypeVar("T")

INDEX = "verifiers_index"
"""The column of a task that says which of the taskset's it is."""


class VerifiersOptions(Settings):
    """`environment.options` for "verifiers", and `tasks.options` for its tasks."""

    taskset: str
    """The taskset's id: one that comes with verifiers, such as "textarena", or a package that holds
    one."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """The taskset's own settings, such as {game = "Wordle-v0"}."""
    env: str = ""
    """Id of an environment to pair the taskset with; empty for the taskset's own."""
    tool: str = "say"
    """The agent's name of the tool that sends its next message."""


class VerifiersEnvironments:
    """The episodes of one verifiers environment."""

    has_reward = True

    def __init__(self, settings: EnvironmentSettings) -> None:
        """Raises `SettingError` for wrong options, a missing package, and environments that the
        agent cannot play through messages alone."""
        options = settings.options_as(VerifiersOptions)
        self.name = f"verifiers {options.taskset}"
        self.capability = settings.capability_without_fork("a running episode cannot be copied")
        self.env = load_environment(options, "environment.options")
        self.agents = _playable(self.env, options.taskset)
        self.tool = EnvironmentTool.tag_of(options.tool)
        description = "Sends your next message or move, and returns the reply."
        self.tools: Sequence[interfaces.Tool] = [
            EnvironmentTool(
                self.tool, description, self.capability, interfaces.Signature.of_text("message")
            )
        ]
        self._tasks: list[Any] = []
        self._rest: Iterator[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def make(self) -> VerifiersEnvironment:
        """Returns a fresh episode, not yet begun."""
        return VerifiersEnvironment(self)

    def task(self, index: int) -> Any:
        """Returns the taskset's own task of this index. Raises `ToolUnavailable` where it has
        fewer."""
        # As far as needed: a taskset may have no end and no access by index.
        self._rest = self._rest or iter(self.env.taskset)
        self._tasks += itertools.islice(self._rest, max(0, index + 1 - len(self._tasks)))
        if not 0 <= index < len(self._tasks):
            raise ToolUnavailable(
                f"{self.name} has {len(self._tasks)} tasks; got the index {index}",
                code="verifiers-index",
            )
        return self._tasks[index]

    async def there(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns the result of `work`, run in the environments' own thread."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(
                target=self._loop.run_forever, daemon=True, name="treegraft-verifiers"
            ).start()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


class VerifiersEnvironment:
    """One episode; its methods run in the thread of the kind."""

    def __init__(self, kind: VerifiersEnvironments) -> None:
        self._kind = kind
        self._seat = _Seat()
        self._run: asyncio.Task[None] | None = None

    async def reset(self, task: Task) -> str:
        """Begins the episode that the task names; returns its first message, the prompt aside,
        which is the question already."""
        index = task.columns.get(INDEX)
        if not isinstance(index, int):
            raise ToolUnavailable(
                f"task '{task.id}' has no column {INDEX}; take the tasks of"
                " treegraft.extras.environments.verifiers.tasks:VerifiersTasks",
                code="verifiers-without-index",
            )
        return await self._kind.there(self._begin(index)) or ""

    async def call(self, name: str, body: str, task: Task) -> str:
        """Returns the next message to the agent. Raises `ToolError` once the episode is over,
        `ToolUnavailable` where it broke."""
        return await self._kind.there(self._say(body))

    async def reward(self) -> float:
        """Ends the episode and returns its reward."""
        return await self._kind.there(self._finish())

    async def close(self) -> None:
        """Breaks the episode off where it still runs."""
        if self._run is not None:
            await self._kind.there(self._break_off())

    # In the thread of the kind

    async def _begin(self, index: int) -> str | None:
        task = self._kind.task(index)
        # An environment's agents are attributes by name; ours play all from one seat.
        agents = SimpleNamespace(**dict.fromkeys(self._kind.agents, self._seat))
        await self._kind.env.setup(agents)
        self._run = asyncio.create_task(self._kind.env.run(task, agents))
        return await self._next()

    async def _say(self, text: str) -> str:
        if self._run is None or self._run.done():
            raise ToolError(EnvironmentTool.over, code="episode-over")
        self._seat.replies.put_nowait(text)
        said = await self._next()
        return f"[{EnvironmentTool.over}]" if said is None else said

    async def _next(self) -> str | None:
        """The episode's next message; None where it has ended."""
        assert self._run is not None
        # Whichever comes first: an episode may end, or fail, without another message.
        said = asyncio.ensure_future(self._seat.said.get())
        try:
            await asyncio.wait({said, self._run}, return_when=asyncio.FIRST_COMPLETED)
            if said.done():
                return said.result()
        finally:
            said.cancel()
        self._run.result()  # raises its failure
        return None

    async def _finish(self) -> float:
        assert self._run is not None
        if not self._run.done():
            # Tells the environment that its agent has left; it then scores the episode.
            self._seat.replies.put_nowait(None)
        await self._run
        return float(sum(self._seat.trace.rewards.values()))

    async def _break_off(self) -> None:
        assert self._run is not None
        self._run.cancel()
        await asyncio.gather(self._run, return_exceptions=True)


class _Trace:
    """An environment's record of its episode."""

    def __init__(self) -> None:
        self.rewards: dict[str, float] = {}
        self.metrics: dict[str, float] = {}
        self.info: dict[str, Any] = {}

    def record_reward(self, name: str, value: float, weight: float = 1.0) -> None:
        self.rewards[name] = float(value) * float(weight)

    def record_metric(self, name: str, value: float) -> None:
        self.metrics[name] = float(value)

    def stop(self, condition: str) -> None:
        self.info["stop"] = condition


class _Seat:
    """An agent of verifiers whose messages come from a trajectory; also its one interaction."""

    trainable = True

    def __init__(self) -> None:
        self.trace = _Trace()
        self.said: asyncio.Queue[str] = asyncio.Queue()
        self.replies: asyncio.Queue[str | None] = asyncio.Queue()

    @asynccontextmanager
    async def interaction(self, task: Any, **_: Any) -> AsyncIterator[_Seat]:
        """The exchange with the environment."""
        yield self

    async def turn(self, message: Any = None) -> Any:
        """Says `message` to the agent, and returns its reply as a segment."""
        from verifiers.v1.agent import Segment

        self.said.put_nowait(_text_of(message))
        reply = await self.replies.get()
        return Segment(messages=[], root_reply=reply, terminated=reply is None)

    async def run(self, *_: Any, **__: Any) -> Any:
        raise ToolUnavailable(
            "this environment runs its agent on its own, which no seat can play",
            code="verifiers-own-agent",
        )


def load_environment(options: VerifiersOptions, place: str) -> Any:
    """Returns the environment of verifiers with its taskset.

    Raises `SettingError`, which names `place`, where the package or the taskset cannot be had.
    """
    try:
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config
    except ImportError as error:
        raise SettingError(
            f"{place}: the package 'verifiers' (0.4 or newer) is not installed; run: pip install"
            " 'treegraft[verifiers]'. It cannot share an environment with treegraft[mcp].",
            code="package-missing",
        ) from error
    try:
        config = resolve_env_config(
            {"id": options.env, "taskset": {"id": options.taskset, **options.settings}}
        )
        return load_environment(config)
    except Exception as error:  # a taskset's module may raise anything on import
        raise SettingError(
            f"{place}: taskset '{options.taskset}' cannot be loaded:"
            f" {type(error).__name__}: {error}",
            code="verifiers-not-loaded",
        ) from error


def read_tasks(options: VerifiersOptions, num: int, place: str) -> list[Task]:
    """Returns the first `num` tasks of a taskset, fewer where it has fewer.

    Raises:
        SettingError: as `load_environment`.
        DataError: its tasks cannot be read, or one has no prompt.
    """
    env = load_environment(options, place)
    tasks = []
    try:
        for index, task in enumerate(itertools.islice(iter(env.taskset), num)):
            parts = (task.data.system_prompt or "", task.data.prompt_text)
            question = "\n\n".join(part for part in parts if part)
            name = f"{options.taskset}/{index}"
            tasks.append(Task(id=name, question=question, reference=(), columns={INDEX: index}))
    except Exception as error:  # a taskset may fail as it likes
        raise DataError(
            f"{place}: the tasks of '{options.taskset}' cannot be read:"
            f" {type(error).__name__}: {str(error).strip()}",
            code="verifiers-tasks-unreadable",
        ) from error
    return tasks


def _playable(env: Any, taskset: str) -> list[str]:
    """The names of the environment's agents. Raises `SettingError` for an environment that one
    agent cannot play or that scores without us."""
    from verifiers.v1 import Env, Task

    names = sorted(env._agent_specs)
    task_type = type(env.taskset).task_type()
    # Methods that verifiers' decorator has marked.
    methods = (getattr(task_type, name, None) for name in dir(task_type))
    scores = any(getattr(method, "reward", False) is True for method in methods)
    reason = None
    # A game of two needs two policies.
    if len(names) != 1:
        reason = f"has the agents {', '.join(names)}, expected one"
    elif type(env).__name__ == "SingleAgentEnv":
        reason = (
            "runs its agent on its own, expected an environment whose run() holds a conversation"
            " with it"
        )
    elif scores or task_type.score is not Task.score or type(env).finalize is not Env.finalize:
        reason = "scores what verifiers itself has recorded, expected rewards that run() records"
    if reason is not None:
        raise SettingError(
            f"environment.options: '{taskset}' {reason}.", code="verifiers-taskset-invalid"
        )
    return names


def _text_of(message: Any) -> str:
    """A turn's message as text: a text, messages with contents, or nothing."""
    if isinstance(message, str):
        return message
    contents = []
    for one in message or ():
        # Tasksets write messages as objects or as plain tables.
        content = one.get("content") if isinstance(one, dict) else getattr(one, "content", "")
        if content:
            contents.append(str(content))
    return "\n".join(contents)
