"""A model behind a server as an agent that fills the Step-Trace Buffer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from treegraft import SettingError, Task, ToolUnavailable
from treegraft.extras.chat import ChatClient, ChatError, ChatReply, served_model
from treegraft.extras.teacher.replies import TagProtocol, ToolCallProtocol, plain_text
from treegraft.parts import agents, keyed

AGENT = "buffer.build.agent"
_REFUSES_REQUEST = (400, 413, 422)
"""Statuses that refuse this one request, often for its length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits(temperature=0.7)"""

    temperature: float = 1.0
    max_reply_tokens: int = 1024
    """Of one step, in the server's tokens."""
    max_agent_steps: int = 8
    max_tool_calls: int = 6


class Teacher:
    """Sends one request a step; tools run here."""

    def __init__(
        self,
        client: ChatClient,
        protocol: TagProtocol | ToolCallProtocol,
        toolbox: agents.SessionOpener,
        limits: Limits,
        *,
        seed: int,
        source: str,
    ) -> None:
        """Args:
        protocol: how steps are requested and read.
        toolbox: runs the calls; stays the caller's to close.
        seed: of the requests.
        source: the teacher's name in the buffer.
        """
        self.source = source
        self._client = client
        self._protocol = protocol
        self._toolbox = toolbox
        self._limits = limits
        self._seed = seed

    async def solve(self, task: Task, sample: int) -> agents.Attempt:
        """Returns the model's attempt; failed if the server gave no reply, the reply was not in
        the format, or there was no answer within the limits."""
        async with self._toolbox.sessions(task) as sessions:
            try:
                # An environment may change the question, say by its first observation.
                shown = await sessions.prepare(1)
                session = await sessions.start(0).open()
                attempt = await self._attempt(shown, sample, session)
                # Asked before the sessions end; a failed attempt's state is worth nothing.
                reward = await session.reward() if attempt.error is None else None
            except ToolUnavailable as error:
                return agents.Attempt(error=str(error))
            question = None if shown is task else shown.question
            return replace(attempt, environment_reward=reward, question=question)

    async def _attempt(self, task: Task, sample: int, session: agents.Session) -> agents.Attempt:
        limits = self._limits
        protocol = self._protocol
        messages: list[Mapping[str, Any]] = [*task.conversation(protocol.system_prompt)]
        made = agents.Attempt()
        num_calls = 0
        for number in range(limits.max_agent_steps):
            try:
                reply = await self._reply(messages, task, sample, number)
            except ChatError as error:
                return replace(made, error=str(error), is_outage=self._is_outage(error))
            # Also of attempts that fail, since they cost as much.
            read, written = made.num_tokens
            made = replace(
                made,
                num_requests=made.num_requests + 1,
                num_tokens=(read + reply.num_tokens[0], written + reply.num_tokens[1]),
            )
            try:
                content, message = protocol.read(reply, number)
            except agents.Violation as violation:
                return replace(made, error=str(violation), refused=plain_text(reply))
            if content.answer is not None:
                return replace(made, contents=(*made.contents, content))
            # Counted before they are run: the call beyond the limit is not.
            num_calls += len(content.calls)
            if num_calls > limits.max_tool_calls:
                return replace(made, error=f"no answer within {limits.max_tool_calls} tool calls")
            try:
                shown = [await session.call(call) for call in content.calls]
            except (ValueError, ToolUnavailable) as error:
                return replace(made, error=str(error))
            done = replace(content, observations=tuple(shown))
            made = replace(made, contents=(*made.contents, done))
            messages += [message, *protocol.results(message, shown)]
        return replace(made, error=f"no answer within {limits.max_agent_steps} steps")

    async def _reply(
        self, messages: Sequence[Mapping[str, Any]], task: Task, sample: int, number: int
    ) -> ChatReply:
        # By its place, so that a build that goes on makes the same requests.
        seed = keyed.keyed_int(self._seed, "endpoint", task.id, sample, number) % 2**31
        return await self._client.complete(
            messages,
            temperature=self._limits.temperature,
            max_tokens=self._limits.max_reply_tokens,
            seed=seed,
            stop=self._protocol.stop,
            tools=self._protocol.tools,
        )

    def _is_outage(self, error: ChatError) -> bool:
        """A request refused for its length, say, is no evidence about the next task's. One refused
        for its tools is: vLLM without a parser of calls refuses all of them."""
        refuses_tools = bool(self._protocol.tools) and "tool" in str(error).lower()
        return error.status not in _REFUSES_REQUEST or refuses_tools

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.close()


def teacher_of(parts: agents.Parts) -> Teacher:
    """Returns the teacher that [buffer.build] of a recipe describes.

    Raises:
        SettingError: an address or a key that cannot be used, or no package openai.
        ModelError: the server does not say which model it serves.
    """
    # The table has the fields of `TeacherSettings` too.
    own: Any = parts.config.buffer.build
    config = parts.config
    key = _key_in(own.api_key_env)
    model = own.model
    if model is None:
        model = served_model(own.agent, key, option=AGENT, model_option="buffer.build.model")
    client = ChatClient(
        own.agent,
        model,
        option=AGENT,
        api_key=key,
    )
    limits = Limits(
        temperature=own.temperature,
        max_reply_tokens=config.rollout.max_completion_tokens,
        max_agent_steps=config.rollout.max_agent_steps,
        max_tool_calls=config.rollout.max_tool_calls,
    )
    source = own.source or model
    return Teacher(
        client, _protocol(parts), parts.toolbox, limits, seed=config.run.seed, source=source
    )


def _protocol(parts: agents.Parts) -> TagProtocol | ToolCallProtocol:
    tools = list(parts.toolbox.tools.values())
    # The tools of a chat recipe are described by the server's template, as for its own agent.
    if isinstance(parts.format, agents.TurnFormat):
        return ToolCallProtocol(parts.format, tools)
    words = parts.config.format
    tags = agents.TagsFormat(
        parts.tokenizer, tools, require_think=words.require_think, require_boxed=words.require_boxed
    )
    # A recipe whose own agent needs no words still has to explain the tags to a stranger.
    return TagProtocol(tags, words.system_prompt or tags.system_prompt)


def _key_in(variable: str | None) -> str | None:
    """The key in an environment variable, None if no variable is named."""
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise SettingError(
            f"buffer.build.api_key_env {variable}: that environment variable is not set; expected"
            " the server's key in it",
            code="key-unset",
        )
    return key
