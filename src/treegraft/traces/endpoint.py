"""A model behind OpenAI's chat completions as an agent that fills the Step-Trace Buffer."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from treegraft.core.chat_client import ChatClient, ChatError, ChatReply
from treegraft.core.errors import ToolUnavailable
from treegraft.core.keyed import keyed_int
from treegraft.core.sessions import Session
from treegraft.core.types import StepContent, Task
from treegraft.rollout.formats.tags import RESULT, TagsFormat
from treegraft.tools.toolbox import Toolbox
from treegraft.traces.agents import Attempt

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
    ) -> None:
        """Args:
        format: replies are parsed by its tags; its tokenizer plays no part.
        toolbox: runs the calls; stays the caller's to close.
        seed: of requests and waits.

        Raises SettingError for a url that is no http(s) address.
        """
        self.source = source
        self._settings, self._format, self._toolbox, self._seed = settings, format, toolbox, seed
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
        settings, contents, num_calls = self._settings, tuple[StepContent, ...](), 0
        messages = task.conversation(settings.system_prompt)
        for number in range(settings.max_agent_steps):
            key = (task.id, sample, number)
            try:
                reply = await self._client.complete(
                    messages,
                    temperature=settings.temperature,
                    max_tokens=settings.max_reply_tokens,
                    seed=keyed_int(self._seed, "endpoint", *key) % 2**31,
                    noise_key=(self._seed, "backoff", *key),
                    stop=[*self._format.stop, *self._format.final],
                )
                text = self._with_closing_tag(reply)
                parsed = self._format.parse_text(text)
                if parsed.violation is not None:
                    raise ValueError(f"a reply not in the format: {parsed.violation}")
                if not parsed.is_complete:
                    raise ValueError("a reply without a whole call or answer")
                content = parsed.content
                if content.answer is not None:
                    return Attempt(contents=(*contents, content))
                # Counted before they are run: the call beyond the limit is not.
                num_calls += len(content.calls)
                if num_calls > settings.max_tool_calls:
                    limit = f"{settings.max_tool_calls} tool calls"
                    return Attempt(contents=contents, error=f"no answer within {limit}")
                shown = [await session.call(call) for call in content.calls]
            except ChatError as error:
                # A request refused for its length, say, tells nothing about the next task's.
                is_outage = error.status not in _REFUSES_REQUEST
                return Attempt(contents=contents, error=str(error), is_outage=is_outage)
            except (ValueError, ToolUnavailable) as error:
                return Attempt(contents=contents, error=str(error))
            contents = (*contents, replace(content, observations=tuple(shown)))
            # Sanitised: a result must not pose as a tag.
            results = [
                f"<{RESULT}>\n{self._format.sanitized(one.text)}\n</{RESULT}>" for one in shown
            ]
            messages.append({"role": "assistant", "content": text})
            messages.append({"role": "user", "content": "\n".join(results)})
        limit = f"{settings.max_agent_steps} steps"
        return Attempt(contents=contents, error=f"no answer within {limit}")

    def _with_closing_tag(self, reply: ChatReply) -> str:
        """Returns the text of a reply up to its first closing tag, which servers leave out, or
        which they did not stop at."""
        closing_tags, text = (*self._format.stop, *self._format.final), reply.text
        if reply.reasoning and "<think>" not in text:
            text = f"<think>\n{reply.reasoning}\n</think>\n{text}"
        if ends := [text.find(tag) + len(tag) for tag in closing_tags if tag in text]:
            return text[: min(ends)]
        opened = re.findall(r"<([a-z_]+)>", text)
        closing = f"</{opened[-1]}>" if opened else ""
        return text + closing if closing in closing_tags and not reply.is_cut else text

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.close()
