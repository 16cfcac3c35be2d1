"""Off-policy agents: who fills the Step-Trace Buffer. Each answers a task as often as it is asked,
and never raises for it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from treegraft.core.chat_client import api_root
from treegraft.core.errors import ModelError, ToolUnavailable
from treegraft.core.interfaces import TaskSource
from treegraft.core.keyed import keyed_int, keyed_unit
from treegraft.core.sessions import Session
from treegraft.core.types import Observation, Status, StepContent, Task, Trajectory, Tree
from treegraft.rollout.formats.tags import RESULT, TagsFormat
from treegraft.rollout.loop import Grower
from treegraft.tools.toolbox import Toolbox

if TYPE_CHECKING:
    import httpx

MAX_BACKOFF_S = 30.0
"""Longest wait before another request, in seconds, whatever the server asks for."""
_AGAIN = frozenset({408, 409, 425, 429})
"""Statuses besides 5xx after which the same request may succeed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Attempt(contents=(StepContent(calls=(ToolCall("search", "e9 r2"),), ...),
    StepContent(answer="e41")))"""

    contents: tuple[StepContent, ...] = ()
    """The steps in order, results included; the last one holds the answer. What there was of a
    failed attempt."""
    error: str | None = None
    """Why it failed, in words that other failures of the kind share; None for an attempt that ended
    in an answer."""
    is_outage: bool = False
    """The agent could not be reached, so the next attempt will hardly fare better."""
    environment_reward: float | None = None
    """What its environment gave in the end; None without one."""


class Agent(Protocol):
    """Answers tasks, each attempt apart from the others."""

    source: str
    """Its name in the buffer."""

    async def solve(self, task: Task, sample: int) -> Attempt:
        """Returns the attempt of number `sample`, 0, 1, ...; failures are data on it."""
        ...

    async def close(self) -> None: ...


class ScriptedAgent:
    """The scripted expert of a task source."""

    def __init__(self, tasks: TaskSource, *, seed: int, source: str = "expert") -> None:
        """Args:
        seed: with the task and the sample it makes the seed of the expert's own choices.
        """
        self.source = source
        self._tasks = tasks
        self._seed = seed

    async def solve(self, task: Task, sample: int) -> Attempt:
        """Returns the expert's solution; failed for tasks that have none."""
        contents = self._tasks.expert(task, keyed_int(self._seed, "expert", task.id, sample))
        return (
            Attempt(contents=contents)
            if contents
            else Attempt(error="there is no scripted expert for the task")
        )

    async def close(self) -> None:
        """Has nothing to close."""


class CheckpointAgent:
    """A model in this process, by the same rollout as in training: all attempts at a task are the
    leaves of one tree."""

    def __init__(
        self, grower: Grower, *, num_samples: int, max_live_trees: int, seed: int, source: str
    ) -> None:
        """Args: grower: opens `num_samples` independent starts a tree; its engine and tools stay
        the caller's to close. num_samples: attempts that will be asked for at each task.
        max_live_trees: tasks under way at once.
        """
        self.source = source
        self._grower = grower
        self._num_samples = num_samples
        self._gate = asyncio.Semaphore(max_live_trees)
        self._seed = seed
        self._growing: dict[str, tuple[asyncio.Task[Tree], set[int]]] = {}

    async def solve(self, task: Task, sample: int) -> Attempt:
        """Returns the leaf of that number; failed unless it is a completed answer."""
        growing, waiting = self._growing.get(task.id) or (
            asyncio.create_task(self._grow(task)),
            set(range(self._num_samples)),
        )
        self._growing[task.id] = (growing, waiting)
        waiting.discard(sample)
        if not waiting:
            del self._growing[task.id]
        return _attempt(growing.result() if growing.done() else await growing, sample)

    async def _grow(self, task: Task) -> Tree:
        async with self._gate:
            return await self._grower.grow(
                task, noise_key=(self._seed, "buffer"), group_id=f"buffer/{task.id}"
            )

    async def close(self) -> None:
        """Cancels what is under way."""
        for growing, _ in self._growing.values():
            growing.cancel()
        await asyncio.gather(
            *(growing for growing, _ in self._growing.values()), return_exceptions=True
        )


def _attempt(tree: Tree, sample: int) -> Attempt:
    trajectories = tree.trajectories()
    if sample >= len(trajectories):
        return Attempt(error="the tree has too few leaves")
    trajectory = trajectories[sample]
    contents = tuple(trajectory.contents)
    if trajectory.status is Status.COMPLETED:
        return Attempt(contents=contents, environment_reward=trajectory.leaf.environment_reward)
    return Attempt(contents=contents, error=_how_it_ended(trajectory))


def _how_it_ended(trajectory: Trajectory) -> str:
    last = trajectory.steps[-1]
    if trajectory.status is Status.FAILED:
        return f"failed: {trajectory.leaf.error}"
    if last.violation is not None:
        return f"not in the format: {last.violation}"
    return (
        f"no answer within its limits: {last.stop_reason.value if last.stop_reason else 'unknown'}"
    )


# ---------------------------------------------------------------------- servers


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSettings:
    """EndpointSettings(url="http://127.0.0.1:8000/v1", model="Qwen3-14B", system_prompt="Answer the
    user's question. ...")"""

    url: str
    """Of an OpenAI-compatible server, with or without /v1."""
    model: str
    system_prompt: str = ""
    """Explains the tags; "" sends none."""
    api_key: str | None = field(default=None, repr=False)
    """Sent as bearer token; None sends none."""
    temperature: float = 1.0
    max_reply_tokens: int = 1024
    """Of one step, in the server's tokens."""
    max_agent_steps: int = 8
    max_tool_calls: int = 6
    timeout_s: float = 120.0
    """Longest wait for one reply."""
    max_retries: int = 4
    """Further requests after one that failed."""
    backoff_s: float = 1.0
    """Wait before the first of them; it doubles each time, and a keyed part of up to half is taken
    off."""


class _NoReply(Exception):
    """A request that failed; the message says how, in words that other requests share."""

    def __init__(self, reason: str, *, is_outage: bool = True) -> None:
        super().__init__(reason)
        self.is_outage = is_outage


class EndpointAgent:
    """A model behind OpenAI's chat completions: one request a step, tools run here."""

    def __init__(
        self,
        settings: EndpointSettings,
        format: TagsFormat,
        toolbox: Toolbox,
        *,
        seed: int,
        source: str,
    ) -> None:
        """Args:
        format: its tags are what replies are read by; its tokenizer plays no part.
        toolbox: runs the calls; stays the caller's to close.
        seed: of requests and waits.

        Raises SettingError for a url that is none.
        """
        self.source = source
        self._settings = settings
        self._url = f"{api_root(settings.url)}/chat/completions"
        self._format = format
        self._toolbox = toolbox
        self._seed = seed
        self._http: httpx.AsyncClient | None = None

    async def solve(self, task: Task, sample: int) -> Attempt:
        """Returns what the model did; failed where it could not be asked, replied nonsense, or came
        to no answer."""
        async with self._toolbox.sessions(task) as sessions:
            try:
                task = await sessions.prepare(1)
                session = await sessions.start(0).open()
                attempt = await self._play(task, sample, session)
                reward = await session.reward() if attempt.error is None else None
            except ToolUnavailable as error:
                return Attempt(error=str(error))
            return replace(attempt, environment_reward=reward)

    async def _play(self, task: Task, sample: int, session: Session) -> Attempt:
        settings = self._settings
        messages = (
            [{"role": "system", "content": settings.system_prompt}]
            if settings.system_prompt
            else []
        )
        messages.append({"role": "user", "content": task.question})
        contents: list[StepContent] = []
        num_calls = 0
        for number in range(settings.max_agent_steps):
            try:
                reply = await self._reply(messages, (task.id, sample, number))
                content = self._read(reply)
                if content.answer is not None:
                    return Attempt(contents=(*contents, content))
                num_calls += len(content.calls)
                if num_calls > settings.max_tool_calls:
                    return Attempt(
                        contents=tuple(contents),
                        error=f"no answer within {settings.max_tool_calls} tool calls",
                    )
                shown = [await session.call(call) for call in content.calls]
            except _NoReply as error:
                return Attempt(
                    contents=tuple(contents), error=str(error), is_outage=error.is_outage
                )
            except (ValueError, ToolUnavailable) as error:
                return Attempt(contents=tuple(contents), error=str(error))
            contents.append(replace(content, observations=tuple(shown)))
            messages += [
                {"role": "assistant", "content": reply},
                {"role": "user", "content": self._shown(shown)},
            ]
        return Attempt(
            contents=tuple(contents), error=f"no answer within {settings.max_agent_steps} steps"
        )

    def _read(self, reply: str) -> StepContent:
        """Returns the step that a reply says. Raises ValueError for one that says none."""
        parsed = self._format.parse_text(reply)
        if parsed.violation is not None:
            raise ValueError(f"a reply not in the format: {parsed.violation}")
        if not parsed.is_complete:
            raise ValueError("a reply without a whole call or answer")
        return parsed.content

    def _shown(self, observations: Sequence[Observation]) -> str:
        return "\n".join(
            f"<{RESULT}>\n{self._format.sanitized(one.text)}\n</{RESULT}>" for one in observations
        )

    # Requests

    async def _reply(self, messages: Sequence[Mapping[str, str]], key: tuple[str, int, int]) -> str:
        """Returns the model's text with the tag that ended it. Raises _NoReply once all requests
        have failed."""
        settings = self._settings
        body = {
            "model": settings.model,
            "messages": list(messages),
            "temperature": settings.temperature,
            "max_tokens": settings.max_reply_tokens,
            "stop": [*self._format.stop, *self._format.final],
            "seed": keyed_int(self._seed, "endpoint", *key) % 2**31,
        }
        for attempt in range(settings.max_retries + 1):
            try:
                return self._with_closing_tag(await self._request(body))
            except _Again as error:
                if attempt == settings.max_retries:
                    raise _NoReply(str(error)) from error
                luck = keyed_unit(self._seed, "backoff", *key, attempt)
                wait_s = settings.backoff_s * 2**attempt * (1.0 - luck / 2)
                await asyncio.sleep(min(max(wait_s, error.wait_s), MAX_BACKOFF_S))
        raise _NoReply("no request was made")

    async def _request(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the first choice of one reply. Raises _Again where another request may succeed,
        else _NoReply."""
        import httpx

        if self._http is None:
            headers = (
                {"Authorization": f"Bearer {self._settings.api_key}"}
                if self._settings.api_key
                else {}
            )
            limits = httpx.Limits(max_connections=None)
            # The wait as a whole is limited below; httpx would limit each read by itself.
            self._http = httpx.AsyncClient(headers=headers, timeout=None, limits=limits)
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                response = await self._http.post(self._url, json=body)
        except TimeoutError as error:
            raise _Again(f"no reply within {self._settings.timeout_s:g} s") from error
        except httpx.HTTPError as error:
            raise _Again(f"no reply: {type(error).__name__}") from error
        if response.status_code in _AGAIN or response.status_code >= 500:
            raise _Again(
                f"HTTP {response.status_code}", _seconds(response.headers.get("retry-after"))
            )
        if response.status_code != 200:
            reason = f"HTTP {response.status_code}: {' '.join(response.text[:200].split())}"
            # What these refuse is this one request, often for its length.
            raise _NoReply(reason, is_outage=response.status_code not in (400, 413, 422))
        try:
            choice = response.json()["choices"][0]
            if not isinstance(choice["message"], dict):
                raise TypeError
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            raise _Again("a reply that is no chat completion") from error
        return dict(choice)

    def _with_closing_tag(self, choice: Mapping[str, Any]) -> str:
        """The text of a reply up to its first closing tag, which servers leave out, or which they
        did not stop at."""
        message = choice["message"]
        text = message.get("content") or ""
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if not isinstance(text, str):
            raise _Again("a reply that is no chat completion")
        if isinstance(reasoning, str) and reasoning.strip() and "<think>" not in text:
            # Servers with a reasoning parser hand the thought over apart from the text.
            text = f"<think>\n{reasoning.strip()}\n</think>\n{text}"
        ends = [
            text.find(tag) + len(tag)
            for tag in (*self._format.stop, *self._format.final)
            if tag in text
        ]
        if ends:
            return text[: min(ends)]
        opened = re.findall(r"<([a-z_]+)>", text)
        closing = f"</{opened[-1]}>" if opened else ""
        was_cut = choice.get("finish_reason") == "length"
        return (
            text + closing
            if closing in (*self._format.stop, *self._format.final) and not was_cut
            else text
        )

    async def close(self) -> None:
        """Closes the connections."""
        if self._http is not None:
            await self._http.aclose()
            self._http = None


class _Again(Exception):
    """A request that failed in a way that another may not."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


def _seconds(header: str | None) -> float:
    try:
        return max(0.0, float(header or 0.0))
    except ValueError:  # a date, which HTTP allows too
        return 0.0


def served_model(
    url: str,
    api_key: str | None,
    *,
    timeout_s: float = 10.0,
    option: str = "--agent",
    model_option: str = "--model",
) -> str:
    """Returns the one model that a server has.

    Args:
        option: what the command line calls the address.
        model_option: what it calls the model's name.

    Raises:
        ModelError: the server cannot be asked, or has none or several.
    """
    import httpx

    place = f"{api_root(url, option)}/models"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        response = httpx.get(place, headers=headers, timeout=timeout_s)
        response.raise_for_status()
        names = [str(model["id"]) for model in response.json()["data"]]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{option} {url}: the server did not say what it serves ({type(error).__name__});"
            f" expected a list of models at {place}. Start it, correct the address, or name the"
            f" model with {model_option}."
        ) from error
    if len(names) != 1:
        raise ModelError(
            f"{option} {url} serves {', '.join(names) or 'no model'}; name one of them with"
            f" {model_option}."
        )
    return names[0]
