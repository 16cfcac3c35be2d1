"""A model behind OpenAI's chat completions as an agent that fills the Step-Trace Buffer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from treegraft.core.chat_client import ChatClient, ChatError, ChatReply
from treegraft.core.errors import ToolUnavailable
from treegraft.core.interfaces import Tool
from treegraft.core.keyed import keyed_int
from treegraft.core.sessions import Session
from treegraft.core.types import Observation, StepContent, Task
from treegraft.rollout.formats.chat import ChatFormat, tool_schema
from treegraft.rollout.formats.markup import Violation
from treegraft.rollout.formats.tags import RESULT, TagsFormat
from treegraft.tools.toolbox import Toolbox
from treegraft.traces.agents import Attempt
from treegraft.traces.replies import Said, read_reply, shown_reply, with_thought

_REFUSES_REQUEST = (400, 413, 422)
"""Statuses that refuse this one request, often for its length."""


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


@dataclass(frozen=True, slots=True)
class Estimate:
    """The most that attempts can ask of a server."""

    num_requests: int
    num_read: int
    """Tokens of the requests."""
    num_written: int
    """Tokens of the replies."""


CHARS_PER_TOKEN = 4
"""Of English text, roughly; another model's tokenizer is not at hand."""


def most_asked(
    settings: EndpointSettings, num_attempts: int, prompt_chars: float, result_chars: int
) -> Estimate:
    """Returns the most requests and tokens of attempts that go up to their limits.

    With n requests, each reads the prompt P and the steps before it, of at most R tokens and a
    result of O: n P + (R + O) n (n - 1) / 2 are read, n R are written.

    Args:
        prompt_chars: mean length of the prompts in characters, CHARS_PER_TOKEN to a token.
        result_chars: longest result of a tool.
    """
    num = min(settings.max_agent_steps, settings.max_tool_calls + 1)
    reply, result = settings.max_reply_tokens, result_chars / CHARS_PER_TOKEN
    read = num * prompt_chars / CHARS_PER_TOKEN + (reply + result) * num * (num - 1) / 2
    return Estimate(num_attempts * num, round(num_attempts * read), num_attempts * num * reply)


class _InTags:
    """Asks for the tags of the papers' format."""

    def __init__(self, format: TagsFormat, system_prompt: str) -> None:
        self._format, self.system_prompt = format, system_prompt
        self.stop, self.tools = [*format.stop, *format.final], list[dict[str, Any]]()

    def read(self, reply: ChatReply, place: int) -> Said:
        """Returns the step of a reply; raises Violation."""
        names = [tag[2:-1] for tag in self.stop]
        text = with_thought(self._with_closing_tag(reply), names)
        parsed = self._format.parse_text(text)
        if parsed.violation is not None:
            raise Violation(f"a reply not in the format: {parsed.violation}")
        if not parsed.is_complete:
            raise Violation("a reply without a whole call or answer")
        return Said(parsed.content, {"role": "assistant", "content": text})

    def results(self, said: Said, shown: Sequence[Observation]) -> list[dict[str, Any]]:
        """Returns the messages with the results of a step."""
        # Sanitised: a result must not pose as a tag.
        texts = [f"<{RESULT}>\n{self._format.sanitized(one.text)}\n</{RESULT}>" for one in shown]
        return [{"role": "user", "content": "\n".join(texts)}]

    def _with_closing_tag(self, reply: ChatReply) -> str:
        """Returns the text of a reply up to its first closing tag, which servers leave out, or
        which they did not stop at."""
        text = reply.text
        if reply.reasoning and "<think>" not in text:
            text = f"<think>\n{reply.reasoning}\n</think>\n{text}"
        if ends := [text.find(tag) + len(tag) for tag in self.stop if tag in text]:
            return text[: min(ends)]
        opened = re.findall(r"<([a-z_]+)>", text)
        closing = f"</{opened[-1]}>" if opened else ""
        return text + closing if closing in self.stop and not reply.is_cut else text


class _InFields:
    """Names the tools in the request, as the agents of chat recipes are asked too."""

    def __init__(self, format: ChatFormat, tools: Sequence[Tool]) -> None:
        self._format, self.system_prompt = format, format.system_prompt
        self.stop, self.tools = list[str](), [tool_schema(tool) for tool in tools]

    def read(self, reply: ChatReply, place: int) -> Said:
        """Returns the step of a reply; raises Violation."""
        try:
            return read_reply(reply, self._format, place)
        except Violation as violation:
            raise Violation(f"a reply not in the format: {violation}") from None

    def results(self, said: Said, shown: Sequence[Observation]) -> list[dict[str, Any]]:
        """Returns the messages with the results of a step."""
        return said.results(shown)


class _Play:
    """One attempt under way."""

    def __init__(self, task: Task, sample: int, system_prompt: str) -> None:
        self.task, self.sample = task, sample
        self.messages: list[Mapping[str, Any]] = [*task.conversation(system_prompt)]
        self.contents: tuple[StepContent, ...] = ()
        self.num_calls = self.num_requests = self.num_read = self.num_written = 0

    def ended(self, error: str | None = None, **more: Any) -> Attempt:
        """Returns the attempt as it stands."""
        return Attempt(
            contents=self.contents,
            error=error,
            num_requests=self.num_requests,
            num_tokens=(self.num_read, self.num_written),
            **more,
        )


class EndpointAgent:
    """Sends one request a step; tools run here."""

    def __init__(
        self,
        settings: EndpointSettings,
        format: TagsFormat,
        toolbox: Toolbox,
        *,
        seed: int,
        source: str,
        chat: ChatFormat | None = None,
        tools: Sequence[Tool] = (),
    ) -> None:
        """Args:
        format: replies are parsed by its tags; its tokenizer plays no part.
        toolbox: runs the calls; stays the caller's to close.
        seed: of requests and waits.
        chat: of a recipe whose own agent writes chat turns: `tools` are named in the request, and
            replies are read in the marks of any family. None asks for tags.

        Raises SettingError for a url that is no http(s) address.
        """
        self.source = source
        self._settings, self._toolbox, self._seed = settings, toolbox, seed
        self._tags = _InTags(format, settings.system_prompt)
        self._way: _InTags | _InFields = self._tags if chat is None else _InFields(chat, tools)
        self.refusal = ""
        """Why the server was asked in tags although the recipe's agent writes chat turns."""
        self._client = ChatClient(
            settings.url,
            settings.model,
            api_key=settings.api_key,
            timeout_s=settings.timeout_s,
            max_retries=settings.max_retries,
            backoff_s=settings.backoff_s,
        )

    async def solve(self, task: Task, sample: int) -> Attempt:
        """Returns the model's attempt; failed where the server gave no reply, the reply was not in
        the format, or there was no answer within the limits."""
        async with self._toolbox.sessions(task) as sessions:
            try:
                shown = await sessions.prepare(1)
                session = await sessions.start(0).open()
                attempt = await self._play(shown, sample, session)
                # Asked before the sessions end; a failed attempt's state is worth nothing.
                reward = await session.reward() if attempt.error is None else None
            except ToolUnavailable as error:
                return Attempt(error=str(error))
            question = None if shown is task else shown.question
            return replace(attempt, environment_reward=reward, question=question)

    async def _play(self, task: Task, sample: int, session: Session) -> Attempt:
        settings, way = self._settings, self._way
        play = _Play(task, sample, way.system_prompt)
        for number in range(settings.max_agent_steps):
            try:
                reply = await self._reply(play, way, number)
            except ChatError as error:
                if way is not self._tags and _refuses_tools(error):
                    self._way, self.refusal = self._tags, str(error)
                    return await self._play(task, sample, session)
                # A request refused for its length, say, tells nothing about the next task's.
                return play.ended(str(error), is_outage=error.status not in _REFUSES_REQUEST)
            try:
                said = way.read(reply, number)
            except Violation as violation:
                return play.ended(str(violation), refused=shown_reply(reply))
            if said.content.answer is not None:
                play.contents = (*play.contents, said.content)
                return play.ended()
            # Counted before they are run: the call beyond the limit is not.
            play.num_calls += len(said.content.calls)
            if play.num_calls > settings.max_tool_calls:
                return play.ended(f"no answer within {settings.max_tool_calls} tool calls")
            try:
                shown = [await session.call(call) for call in said.content.calls]
            except (ValueError, ToolUnavailable) as error:
                return play.ended(str(error))
            play.contents = (*play.contents, replace(said.content, observations=tuple(shown)))
            play.messages += [said.message, *way.results(said, shown)]
        return play.ended(f"no answer within {settings.max_agent_steps} steps")

    def estimate(self, tasks: Sequence[Task], num_samples: int, result_chars: int) -> Estimate:
        """Returns the most that `num_samples` attempts at each task can ask of the server."""
        tools = len(json.dumps(self._way.tools)) if self._way.tools else 0
        prompts = [
            sum(len(str(one["content"])) for one in task.conversation(self._way.system_prompt))
            for task in tasks
        ]
        mean = tools + sum(prompts) / max(1, len(prompts))
        return most_asked(self._settings, len(tasks) * num_samples, mean, result_chars)

    async def _reply(self, play: _Play, way: _InTags | _InFields, number: int) -> ChatReply:
        key = (play.task.id, play.sample, number)
        reply = await self._client.complete(
            play.messages,
            temperature=self._settings.temperature,
            max_tokens=self._settings.max_reply_tokens,
            seed=keyed_int(self._seed, "endpoint", *key) % 2**31,
            noise_key=(self._seed, "backoff", *key),
            stop=way.stop,
            tools=way.tools,
        )
        play.num_requests += 1
        play.num_read += reply.num_tokens[0]
        play.num_written += reply.num_tokens[1]
        return reply

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.close()


def _refuses_tools(error: ChatError) -> bool:
    """Whether a server refused the field `tools`, as vLLM does where it has no parser of calls."""
    return error.status in _REFUSES_REQUEST and "tool" in str(error).lower()
