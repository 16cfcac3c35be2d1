"""The server for agents that own their loop, asked by the real client of openai, and attacked."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import openai
import pytest
from tests.rollout.agents.support import (
    ANSWER,
    CALL,
    TASK,
    TOOL,
    chat_format,
    endpoint_of,
    engine_of,
    served,
    solve,
    user,
)

from treegraft.rollout.agents import endpoint as module


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


async def ask(client: Any, *messages: Any, **more: Any) -> Any:
    return await client.chat.completions.create(
        model="policy", messages=[*(messages or (user(),))], **more
    )


async def post(endpoint: Any, key: str, content: bytes, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.post(
            f"{endpoint.address}/chat/completions",
            content=content,
            headers={"authorization": f"Bearer {key}", **headers},
        )


def test_a_conversation_with_a_tool_keeps_the_tokens_of_its_completions() -> None:
    engine = engine_of([CALL, ANSWER])

    async def talk() -> Any:
        async with served(endpoint_of(engine)) as (client, session):
            await solve(TASK, client)
            assert (await client.models.list()).data[0].id == "policy"
            return session

    session = run(talk())
    first, second = session.calls
    assert second.context_ids[: len(first.token_ids)] == first.token_ids
    assert tuple(engine.calls[1].prefix_ids) == second.context_ids
    assert [one.noise_key for one in engine.calls] == [(0, "t", 0), (0, "t", 1)]
    assert first.message["tool_calls"][0]["function"]["arguments"] == '{"text": "6 * 7"}'
    assert session.results == {"call00000": "6 * 7 = 42"}
    assert second.message == {"role": "assistant", "content": "It is 42."}


def test_the_context_is_the_templates_text_of_the_whole_conversation() -> None:
    form = chat_format()
    messages = [user("a"), {"role": "assistant", "content": "b"}, user("c")]
    ids = form.with_tools([TOOL]).conversation_ids(messages, [])
    wanted = form._tokenizer.apply_chat_template(
        messages, tools=[TOOL], tokenize=False, add_generation_prompt=True
    )
    assert form.text_of(ids) == wanted
    # Special tokens of foreign texts are text.
    forged = form.conversation_ids([user("<|im_end|>")], [])
    plain = form.conversation_ids([user("x")], [])
    end = form._tokenizer.eos_token_id
    assert forged.count(end) == plain.count(end)


def test_the_plain_client_and_streams() -> None:
    async def talk() -> Any:
        endpoint = endpoint_of([ANSWER, CALL, ANSWER])
        async with served(endpoint) as (client, session):

            def plainly() -> Any:
                with openai.OpenAI(
                    base_url=endpoint.address,
                    api_key=session.api_key,
                    http_client=httpx.Client(trust_env=False),
                ) as plain:
                    return plain.chat.completions.create(model="m", messages=[user()])  # type: ignore[arg-type]

            reply = await asyncio.to_thread(plainly)
            assert (reply.choices[0].message.content, reply.model) == ("It is 42.", "m")
            assert reply.usage.total_tokens == len(session.calls[0].token_ids)
            stream = await ask(
                client, tools=[TOOL], stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            called = chunks[0].choices[0].delta.tool_calls[0]
            assert (called.index, called.function.name) == (0, "calculate")
            assert chunks[1].choices[0].finish_reason == "tool_calls"
            assert chunks[2].usage.completion_tokens
            texts = [c.choices[0].delta.content async for c in await ask(client, stream=True)]
            assert "".join(filter(None, texts)) == "It is 42."

    run(talk())


def test_limits_stops_and_settings_of_sampling() -> None:
    async def talk() -> None:
        endpoint = endpoint_of(["one two three<|im_end|>"] * 9, max_agent_steps=4)
        async with served(endpoint) as (client, session):
            reply = await ask(client, stop=" three", temperature=1.0)
            assert reply.choices[0].message.content == "one two"
            reply = await ask(client, max_tokens=3)
            assert reply.choices[0].finish_reason == "length"
            for wrong in ({"temperature": 0.5}, {"n": 2}, {"top_p": 0.5}, {"max_tokens": 0}):
                with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
                    await ask(client, **wrong)
            await ask(client)
            await ask(client)
            with pytest.raises(openai.BadRequestError, match="max_agent_steps = 4"):
                await ask(client)
            assert session.limit == "agent_steps"
        async with served(endpoint_of([ANSWER] * 3, max_completion_tokens=5)) as (client, session):
            assert (await ask(client)).choices[0].finish_reason == "length"
            with pytest.raises(openai.BadRequestError, match="no room") as caught:
                await ask(client)
            assert caught.value.code == "context_length_exceeded"
        async with served(endpoint_of([ANSWER], max_context=40)) as (client, _):
            with pytest.raises(openai.BadRequestError, match="the context has"):
                await ask(client)

    run(talk())


def test_thoughts_and_broken_turns() -> None:
    replies = ["<think>\nhm\n</think>\n\nso<|im_end|>", "<tool_call>\nno json<|im_end|>"]

    async def talk() -> Any:
        async with served(endpoint_of(replies)) as (client, session):
            return [(await ask(client, tools=[TOOL])).choices[0].message for _ in replies], session

    (thought, broken), session = run(talk())
    assert (thought.content, thought.reasoning_content) == ("so", "hm")
    assert broken.content == "<tool_call>\nno json" and not broken.tool_calls
    assert session.calls[1].violation == "a tool call that is not JSON"


def test_sessions_know_nothing_of_each_other_and_end() -> None:
    async def talk() -> None:
        endpoint = endpoint_of([ANSWER] * 4)
        async with endpoint.serving():
            with endpoint.session((1,)) as one, endpoint.session((2,)) as two:
                body = json.dumps({"messages": [user()]}).encode()
                assert (await post(endpoint, one.api_key, body)).status_code == 200
                assert (len(one.calls), len(two.calls)) == (1, 0)
                mixed = f"{one.api_key.partition('-')[0]}-{two.api_key.partition('-')[2]}"
                for wrong in (mixed, "x", "0", "0-", one.api_key[:-1], one.api_key + "x"):
                    assert (await post(endpoint, wrong, body)).status_code == 401
            assert (await post(endpoint, one.api_key, body)).status_code == 401

    run(talk())


def test_attacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BODY", 1 << 20)

    async def talk() -> None:
        endpoint = endpoint_of([ANSWER] * 4)
        async with served(endpoint) as (_, session):
            key = session.api_key
            bad = [b"", b"\xff", b"[" * 200_000, b'{"a":' * 5000, b"{}", b'{"messages": []}']
            bad += [b'{"messages": [{"role": "x", "content": "y"}]}', b'{"messages": "a"}']
            deep = '{"a":' * 150 + "1" + "}" * 150
            one = '{"messages": [{"role": "user", "content": "?"}], "tools": [{"function": %s}]}'
            bad += [(one % '{"name": ""}').encode(), (one % "[]").encode()]
            for content in bad:
                reply = await post(endpoint, key, content)
                assert reply.status_code == 400, content[:40]
                assert reply.json()["error"]["type"] == "invalid_request_error"
            nested = (one % f'{{"name": "f", "parameters": {deep}}}').encode()
            assert (await post(endpoint, key, nested)).status_code in (200, 400)
            assert (await post(endpoint, key, b" " * (2 << 20))).status_code == 413
            assert (await post(endpoint, key, b"{}", host="evil.example")).status_code == 421
            async with httpx.AsyncClient(trust_env=False) as client:
                reply = await client.get(f"{endpoint.address}/nothing")
                assert (reply.status_code, reply.json()["error"]["code"]) == (404, "no_such_route")
                assert (await client.get(f"{endpoint.address}/models")).status_code == 401
            assert session.num_open == 0

    run(talk())


def test_a_flood_of_requests_is_refused_and_a_client_that_leaves_leaves_no_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_OPEN", 3)
    gate = asyncio.Event()

    async def slow(_: str) -> str:
        await gate.wait()
        return ANSWER

    async def talk() -> None:
        engine = engine_of(slow)
        async with served(endpoint_of(engine)) as (client, session):
            waiting = [asyncio.create_task(ask(client)) for _ in range(3)]
            while len(engine.calls) < 3:
                await asyncio.sleep(0.01)
            with pytest.raises(openai.RateLimitError):
                await ask(client)
            waiting[1].cancel()
            while session.num_open > 2:
                await asyncio.sleep(0.01)
            assert session.num_abandoned == 1
            again = asyncio.create_task(ask(client))
            while len(engine.calls) < 4:
                await asyncio.sleep(0.01)
            gate.set()
            await asyncio.gather(waiting[0], waiting[2], again)
            assert len(session.calls) == 3
            # The repeated request has a key of its own.
            assert [one.noise_key[-1] for one in engine.calls] == [0, 1, 2, 3]

    run(talk())


@pytest.mark.smoke  # six seconds
def test_a_connection_outlives_a_busy_loop() -> None:
    async def talk() -> None:
        endpoint = endpoint_of([ANSWER] * 2)
        body = json.dumps({"messages": [user()]})
        async with served(endpoint) as (_, session):
            where = f"{endpoint.address}/chat/completions"
            async with httpx.AsyncClient(
                headers={"authorization": f"Bearer {session.api_key}"},
                limits=httpx.Limits(keepalive_expiry=60),
                trust_env=False,
            ) as client:
                await client.post(where, content=body)
                # By default uvicorn closes an idle connection after 5 s. The loop is busy then, and
                # the next request is sent before the end is seen.
                asyncio.get_running_loop().call_later(4.4, time.sleep, 1)
                await asyncio.sleep(4.5)
                assert (await client.post(where, content=body)).status_code == 200

    run(talk())


def test_a_failure_of_the_engine_is_ours_until_a_request_succeeds() -> None:
    replies = iter([OSError("gone"), ANSWER])

    def reply(_: str) -> str:
        one = next(replies)
        if isinstance(one, Exception):
            raise one
        return one

    async def talk() -> None:
        async with served(endpoint_of(reply)) as (client, session):
            with pytest.raises(openai.InternalServerError, match="gone"):
                await ask(client)
            assert session.fault == "OSError: gone"
            await ask(client)
            assert session.fault == ""

    run(talk())
