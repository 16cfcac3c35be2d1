"""OpenEnv servers: a stand-in that answers as the package's own server does, and that server itself
where it is installed.

TREEGRAFT_OPENENV_PYTHON names a Python with the package `openenv`, which cannot share an
environment with `mcp>=2`.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect
from tests.support.error_codes import raises_code
from tests.tools.test_environments import make_toolbox

from treegraft.core.errors import ToolUnavailable
from treegraft.core.types import Task, ToolCall
from treegraft.settings.tools import EnvironmentSettings
from treegraft.tools.build import open_environments
from treegraft.tools.environments.sessions import Environments

REAL = os.environ.get("TREEGRAFT_OPENENV_PYTHON", "")
TASK = Task(id="t/0", question="Reach ten.", reference=(), columns={"start": 2})
ADD = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
SAY = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
SCHEMAS = {
    "typed": {
        "title": "AddAction",
        "description": "Adds a number to the sum; past 9 the game is over.",
        "properties": {
            "metadata": {"type": "object"},
            "number": {"type": "integer", "description": "What to add"},
        },
        "required": ["number"],
    },
    "mcp": {"title": "CallToolAction", "properties": {}},
}


class StandIn:
    """Sessions of one sum, in the shapes of the package's server 0.10; at most four at once."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.num_live = 0
        self.resets = []
        routes = [
            Route("/schema", lambda _: JSONResponse({"action": SCHEMAS[kind]})),
            WebSocketRoute("/ws", self.session),
        ]
        self.app = Starlette(routes=routes)

    async def session(self, link: WebSocket) -> None:
        await link.accept()
        if self.num_live >= 4:
            await self.error(link, "CAPACITY_REACHED", "Server at capacity: 4/4 sessions active")
            await link.close()
            return
        self.num_live += 1
        total = 0
        try:
            while True:
                message = json.loads(await link.receive_text())
                if message["type"] == "reset":
                    self.resets.append(message["data"])
                    total = message["data"].get("start", 0)
                    await self.observe(link, {"total": total} if self.kind == "typed" else {})
                elif self.kind == "mcp":
                    total = await self.call(link, message["data"], total)
                elif "number" not in message["data"]:
                    faults = [{"loc": ["number"], "msg": "Field required"}]
                    await self.error(link, "VALIDATION_ERROR", "Invalid message", errors=faults)
                else:
                    number = message["data"]["number"]
                    total += number
                    await self.observe(link, {"total": total}, reward=number / 10, done=total > 9)
        except WebSocketDisconnect:
            pass
        finally:
            self.num_live -= 1

    async def call(self, link: WebSocket, action: dict[str, Any], total: int) -> int:
        if action["type"] == "list_tools":
            tools = [("add", "Adds a number to the sum.", ADD), ("say", "Says a word.", SAY)]
            await self.observe(
                link,
                {"tools": [{"name": n, "description": d, "input_schema": s} for n, d, s in tools]},
            )
            return total
        name = action["tool_name"]
        arguments = action["arguments"]
        found: dict[str, Any] = {"tool_name": name, "result": None, "error": None}
        if name == "add" and arguments["number"] < 0:
            found["error"] = {
                "error_type": "execution_error",
                "message": "Error calling tool 'add': no negative numbers",
            }
        else:
            total += arguments.get("number", 0)
            data = f"sum {total}" if name == "add" else {"word": arguments["word"], "total": total}
            text = data if isinstance(data, str) else json.dumps(data)
            found["result"] = {
                "content": [{"type": "text", "text": text}],
                "data": data,
                "is_error": False,
            }
        await self.observe(link, found)
        return total

    async def observe(
        self,
        link: WebSocket,
        fields: dict[str, Any],
        reward: float | None = None,
        done: bool = False,
    ) -> None:
        data = {
            "observation": {"metadata": {"when": time.time()}, **fields},
            "reward": reward,
            "done": done,
        }
        await link.send_text(json.dumps({"type": "observation", "data": data}))

    async def error(self, link: WebSocket, code: str, message: str, **more: Any) -> None:
        await link.send_text(
            json.dumps({"type": "error", "data": {"message": message, "code": code, **more}})
        )


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def wait_for(port: int, deadline_s: float) -> None:
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    pytest.fail(f"no server on port {port} within {deadline_s} s")


@pytest.fixture(
    scope="module", params=["stand-in", pytest.param("openenv", marks=pytest.mark.slow)]
)
def urls(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """Where a server of each kind listens."""
    ports = {kind: free_port() for kind in SCHEMAS}
    if request.param == "openenv":
        if not REAL:
            pytest.skip("TREEGRAFT_OPENENV_PYTHON names no Python with the package openenv")
        script = Path(__file__).parents[1] / "support" / "openenv_server.py"
        started = [
            subprocess.Popen([REAL, script, str(port), kind], env={"PATH": ""})
            for kind, port in ports.items()
        ]
        try:
            for port in ports.values():
                wait_for(port, 120)
            yield {kind: f"http://127.0.0.1:{port}" for kind, port in ports.items()}
        finally:
            for one in started:
                one.terminate()
                one.wait(10)
        return
    servers = []
    for kind, port in ports.items():
        config = uvicorn.Config(
            StandIn(kind).app,
            port=port,
            log_level="error",
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        threading.Thread(target=server.run, daemon=True).start()
        servers.append(server)
    for port in ports.values():
        wait_for(port, 10)
    yield {kind: f"http://127.0.0.1:{port}" for kind, port in ports.items()}
    for server in servers:
        server.should_exit = True


def opened(url: str, capability: str = "replay", **options: Any) -> Environments:
    settings = EnvironmentSettings(
        kind="openenv", options={"url": url, **options}, capability=capability, deadline_s=10
    )  # type: ignore[arg-type]
    kind = open_environments(settings)
    assert kind is not None
    return Environments(kind, settings)


def test_an_action_of_its_own_is_one_tool(urls: dict[str, str]) -> None:
    tool = opened(urls["typed"], tool="add").kind.tools[0]
    assert (tool.name, tool.description) == (
        "add",
        "Adds a number to the sum; past 9 the game is over.",
    )
    schema = tool.signature.schema  # type: ignore[attr-defined]
    assert list(schema["properties"]) == schema["required"] == ["number"]


def test_steps_rewards_branches_and_the_end(urls: dict[str, str]) -> None:
    """From 2: 3 and 4 make 9; a branch after the 3 goes on from 5. Rewards are a tenth of what was
    added."""
    worlds = opened(urls["typed"], tool="add")

    async def work() -> None:
        box = make_toolbox(worlds)
        async with box.sessions(TASK) as sessions:
            assert (await sessions.prepare(2)).question == 'Reach ten.\n{"total": 2}'
            one, other = await sessions.start(0).open(), await sessions.start(1).open()

            async def add(session: Any, number: int) -> str:
                return (await session.call(ToolCall("add", json.dumps({"number": number})))).text

            assert await add(one, 3) == '{"total": 5}'
            point = one.mark()
            point.reserve(1)
            assert await add(one, 4) == '{"total": 9}'
            branch = await point.open()
            assert await add(branch, 1) == '{"total": 6}'
            assert [await session.reward() for session in (one, branch, other)] == [
                pytest.approx(0.7),
                pytest.approx(0.4),
                0.0,
            ]
            refused = await other.call(ToolCall("add", '{"nummer": 1}'))
            assert refused.is_error and "number: Field required" in refused.text
            assert "needs a JSON object" in (await other.call(ToolCall("add", "three"))).text
            assert await add(other, 8) == '{"total": 10}\n[the episode is over; give your answer]'
            assert await add(other, 8) == "the episode is over; give your answer"
            assert await other.reward() == pytest.approx(0.8)
        assert worlds.take_metrics() == {
            "environment/num_opened": 3,
            "environment/num_replays": 1,
            "environment/num_replayed_calls": 1,
            "environment/num_forks": 0,
            "environment/num_mismatches": 0,
            "environment/num_failures": 0,
            "environment/num_rehearsals": 0,
            "environment/num_graft_tries": 0,
            "environment/num_graft_calls": 0,
            "environment/num_untrue_grafts": 0,
        }

    asyncio.run(work())


def test_tools_of_a_server(urls: dict[str, str]) -> None:
    worlds = opened(urls["mcp"])
    assert [(tool.name, tool.description) for tool in worlds.kind.tools] == [
        ("add", "Adds a number to the sum."),
        ("say", "Says a word."),
    ]
    assert [tool.name for tool in opened(urls["mcp"], tools=["say"]).kind.tools] == ["say"]

    async def work() -> None:
        async with make_toolbox(worlds).sessions(TASK) as sessions:
            assert await sessions.prepare(1) is TASK
            session = await sessions.start(0).open()
            assert (await session.call(ToolCall("add", '{"number": 5}'))).text == "sum 7"
            wrong = await session.call(ToolCall("add", '{"number": -5}'))
            assert wrong.is_error and "no negative numbers" in wrong.text
            assert (
                await session.call(ToolCall("say", "hello"))
            ).text == '{"word": "hello", "total": 7}'
            assert (
                await (await session.mark().open()).call(ToolCall("add", '{"number": 1}'))
            ).text == "sum 8"

    asyncio.run(work())


def test_a_server_whose_sessions_are_used_up_says_so(urls: dict[str, str]) -> None:
    worlds = opened(urls["typed"], "none")

    async def work() -> None:
        async with make_toolbox(worlds).sessions(TASK) as sessions:
            await sessions.prepare(5)
            results = await asyncio.gather(
                *(sessions.start(n).open() for n in range(5)), return_exceptions=True
            )
            failed = [str(one) for one in results if isinstance(one, ToolUnavailable)]
            assert len(failed) == 1 and "raise its max_concurrent_envs" in failed[0]

    asyncio.run(work())


@pytest.mark.parametrize(
    ("options", "capability", "code"),
    [
        ({"url": "http://127.0.0.1:9"}, "auto", "openenv-not-there"),
        ({}, "auto", "environment-options-invalid"),
        ({"url": "http://127.0.0.1:9", "tol": "x"}, "auto", "environment-options-invalid"),
        ({"url": "http://127.0.0.1:9"}, "fork", "no-fork"),
    ],
)
def test_what_is_refused(options: dict[str, Any], capability: Any, code: str) -> None:
    with raises_code(code):
        open_environments(
            EnvironmentSettings(kind="openenv", options=options, capability=capability)
        )


def test_a_tool_that_the_server_does_not_have(urls: dict[str, str]) -> None:
    with raises_code("openenv-tool-unknown"):
        opened(urls["mcp"], tools=["shout"])
