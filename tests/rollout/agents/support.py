"""A chat format over bytes, and an endpoint in front of a scripted engine."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.rollout.test_format_tags import byte_tokenizer
from tests.support.tiny_chat import TEMPLATES

from treegraft.core.types import Task
from treegraft.policy.engine.scripted import ScriptedEngine
from treegraft.rollout.agents.endpoint import Endpoint
from treegraft.rollout.formats.answers import AnswerRule
from treegraft.rollout.formats.chat import ChatFormat
from treegraft.rollout.formats.turns import described_tool
from treegraft.rollout.limits import Limits

TASK = Task(id="t/1", question="6 * 7 ?", reference=("42",))
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Computes.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"text": "6 * 7"}}\n</tool_call><|im_end|>'
ANSWER = "It is 42.<|im_end|>"


@functools.cache
def chat_format(template: str = "qwen2_5") -> ChatFormat:
    tokenizer = copy.deepcopy(byte_tokenizer())
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    tokenizer.add_tokens(["<|im_start|>"], special_tokens=True)
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    return ChatFormat(
        tokenizer,
        [described_tool("a_tool")],
        require_think=False,
        require_boxed=False,
        answer=AnswerRule(finds_numbers=True),
    )


def engine_of(replies: Any, template: str = "qwen2_5", **more: Any) -> ScriptedEngine:
    return ScriptedEngine(replies, chat_format(template)._tokenizer, **more)


def limits(**changed: Any) -> Limits:
    values: dict[str, Any] = {
        "num_leaves": 2,
        "temperature": 1.0,
        "max_completion_tokens": 2000,
        "max_agent_steps": 8,
        "max_tool_calls": 4,
        "deadline_s": 20.0,
    }
    return Limits(**{**values, **changed})


def endpoint_of(replies: Any, template: str = "qwen2_5", **more: Any) -> Endpoint:
    max_context = more.pop("max_context", None)
    engine = replies if hasattr(replies, "complete") else engine_of(replies, template)
    return Endpoint(
        engine, chat_format(template), limits(**more), temperature=1.0, max_context=max_context
    )


@asynccontextmanager
async def served(endpoint: Endpoint) -> AsyncIterator[Any]:
    """A client of openai with a session of its own, and that session."""
    import httpx
    from openai import AsyncOpenAI

    async with endpoint.serving():
        with endpoint.session((0, "t")) as session:
            async with (
                httpx.AsyncClient(trust_env=False) as connection,
                AsyncOpenAI(
                    base_url=endpoint.address,
                    api_key=session.api_key,
                    http_client=connection,
                    max_retries=0,
                ) as client,
            ):
                yield client, session


def user(text: str = "6 * 7 ?") -> dict[str, Any]:
    return {"role": "user", "content": text}


async def solve(task: Task, client: Any, *, asked: str = "", shown: str = "") -> str | None:
    """An agent with one tool of its own; the texts stand behind its question and results."""
    messages: list[Any] = [user(task.question + asked)]
    while True:
        reply = await client.chat.completions.create(
            model="policy", messages=messages, tools=[TOOL]
        )
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return None
        for call in message.tool_calls:
            text = json.loads(call.function.arguments)["text"]
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": f"{text} = 42{shown}"}
            )
