"""Tools of Model Context Protocol servers: a real server process over both transports, its faults,
and its end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.error_codes import raises_code
from tests.support.mcp_hostile import GOOD, OVER_HTTP, WAYS

from treegraft.core.errors import SettingError
from treegraft.core.interfaces import Capability, Signature, Tool
from treegraft.core.types import Observation, Task, ToolCall
from treegraft.explore.entropy import EntropyBranching
from treegraft.extras.mcp.client import McpServer, McpTool
from treegraft.extras.mcp.plugin import McpSettings
from treegraft.rollout.formats.markup import system_prompt_for
from treegraft.settings.config import Config
from treegraft.settings.contradictions import check
from treegraft.settings.explore import EntropySettings
from treegraft.settings.load import load_config
from treegraft.settings.table import value_of, with_value
from treegraft.settings.tools import ToolsSettings
from treegraft.tools.build import build_tools
from treegraft.tools.function import tag_of
from treegraft.tools.toolbox import Toolbox

pytest.importorskip("mcp", reason="the extra 'mcp' is not installed")

SUPPORT = Path(__file__).parents[1] / "support"
SCRIPT = str(SUPPORT / "mcp_server.py")
HOSTILE = str(SUPPORT / "mcp_hostile.py")
TASK = Task(id="t/1", question="?", reference=())
STARTED_S = 300.0
"""A busy machine may take long to import the SDK."""


def over_stdio(**options: Any) -> McpSettings:
    return McpSettings(
        name="local", command=[sys.executable, SCRIPT], start_timeout_s=STARTED_S, **options
    )


def with_servers(servers: list[McpSettings]) -> ToolsSettings:
    return with_value(Config().tools, "mcp", servers)


def toolbox_of(tools: list[Tool]) -> Toolbox:
    return Toolbox(
        tools, ToolsSettings(deadline_s=60.0, max_output_chars=200, cache=False, max_concurrent=8)
    )


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    # A child that has ended and was not waited for is as good as gone.
    return state != "Z"


@contextmanager
def over_http(script: str) -> Iterator[str]:
    """A server at a free port of loopback, once it listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, script, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + STARTED_S
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def http_server() -> Iterator[str]:
    with over_http(SCRIPT) as url:
        yield url


async def ask(toolbox: Toolbox, *calls: tuple[str, str]) -> list[Observation]:
    return [await toolbox.call(ToolCall(name, body), TASK) for name, body in calls]


def check_answers(tools: list[Tool]) -> None:
    """What both transports have in common."""

    async def talk() -> list[Observation]:
        toolbox = toolbox_of(tools)
        together = await asyncio.gather(
            *(toolbox.call(ToolCall("add", f'{{"a": {n}}}'), TASK) for n in range(8))
        )
        assert [one.text for one in together] == [str(n + 1) for n in range(8)]
        return await ask(
            toolbox,
            ("get_weather", "Bern"),
            ("add", '{"a": 40, "b": 2}'),
            ("add", "40"),
            ("add", '{"b": 2}'),
            ("fail", "no luck"),
            ("picture", ""),
            ("flood", "{}"),
        )

    seen = asyncio.run(talk())
    assert [one.is_error for one in seen] == [False, False, True, True, True, False, False]
    assert [one.text for one in seen[:2]] == ["sunny in Bern", "42"]
    assert "needs a JSON object" in seen[2].text
    assert "a\n" in seen[3].text and "required" in seen[3].text.lower()
    assert "no luck" in seen[4].text
    assert seen[5].text == "[image, not shown]"
    assert seen[6].is_truncated and len(seen[6].text) == 200


def test_a_command_from_start_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCP_TEST_KEY", "sesame")
    monkeypatch.setenv("MCP_OTHER_KEY", "secret")
    tools = build_tools(with_servers([over_stdio(env=["MCP_TEST_KEY"])]), ())
    by_name = {tool.name: tool for tool in tools}
    assert list(by_name) == [
        "get_weather",
        "add",
        "fail",
        "crash",
        "slow",
        "picture",
        "flood",
        "start",
        "about",
    ]
    weather = by_name["get_weather"]
    add = by_name["add"]
    assert isinstance(weather, McpTool) and isinstance(add, McpTool)
    assert (weather.description, weather.signature.text_parameter) == (
        "Tells the weather of a city.",
        "city",
    )
    assert add.signature.text_parameter is None and list(add.signature.schema["properties"]) == [
        "a",
        "b",
    ]
    assert [tool.capability for tool in (weather, add)] == [Capability.STATELESS, Capability.NONE]
    told = system_prompt_for(tools, True, True)
    assert "<get_weather>...</get_weather> Tells the weather of a city.\n" in told
    assert '<add>...</add> Adds two numbers. Its input is a JSON object: {"a": {' in told
    check_answers(tools)

    async def life_and_death() -> None:
        toolbox = toolbox_of(tools)
        (first,) = await ask(toolbox, ("about", ""))
        pid, *given = first.text.split(" ", 1)
        assert given == ["sesame no other"] and is_alive(int(pid))
        # A second event loop has called by now; a third may, and a caller that gives up takes
        # nobody with it.
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(toolbox.call(ToolCall("slow", '{"seconds": 0.5}'), TASK), 0.05)
        await toolbox.close()
        await toolbox.close()
        assert not is_alive(int(pid))
        with raises_code("mcp-ended"):
            await toolbox.call(ToolCall("about", ""), TASK)

    asyncio.run(life_and_death())
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("treegraft-mcp")
    ]


def ended(pids: Sequence[int], within_s: float = 10.0) -> bool:
    """Waits for the end of processes; kills those that are left."""
    deadline = time.monotonic() + within_s
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return not left


@pytest.mark.parametrize("end", ["close", "crash"])
def test_what_a_server_has_started_ends_with_it(end: str) -> None:
    tools = build_tools(with_servers([over_stdio(max_restarts=0, tools=["start", "crash"])]), ())

    async def talk() -> list[int]:
        toolbox = toolbox_of(tools)
        (told,) = await ask(toolbox, ("start", ""))
        pids = [int(word) for word in told.text.split()]
        assert all(map(is_alive, pids))
        if end == "crash":
            await ask(toolbox, ("crash", ""))
            assert ended(pids)
        await toolbox.close()
        return pids

    pids = asyncio.run(talk())
    assert len(pids) == 4 and ended(pids, within_s=0)


KILLED = """
import asyncio, sys, time
from tests.extras.test_mcp import ask, build_tools, over_stdio, toolbox_of, with_servers
toolbox = toolbox_of(build_tools(with_servers([over_stdio(tools=["start"])]), ()))
print(asyncio.run(ask(toolbox, ("start", "")))[0].text, flush=True)
time.sleep(600)
"""


@pytest.mark.smoke
def test_servers_end_with_a_process_that_is_killed() -> None:
    child = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child.stdout:
        pids = [int(word) for word in child.stdout.readline().split()]
        child.kill()
        child.wait()
    assert len(pids) == 4 and ended(pids)


def test_a_url(http_server: str) -> None:
    tools = build_tools(
        with_servers([McpSettings(name="far", url=http_server, start_timeout_s=STARTED_S)]), ()
    )
    try:
        check_answers(tools)
    finally:
        asyncio.run(toolbox_of(tools).close())


def check_hostile(settings: McpSettings, ways: Mapping[str, str], folder: Path) -> None:
    """Every bad answer is an observation at once, and the connection goes on: in a process of its
    own, whose memory is measured and whose standard error stays empty."""
    code = (
        "import asyncio, resource, sys, time\n"
        "from tests.extras.test_mcp import *\n"
        "settings = McpSettings.model_validate_json(sys.argv[1])\n"
        "tools = build_tools(with_servers([settings]), ())\n"
        "toolbox = toolbox_of(tools)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "pids = set()\n"
        "async def run():\n"
        "    for name in toolbox.tools:\n"
        "        began = time.monotonic()\n"
        "        (found,) = await ask(toolbox, (name, '{}'))\n"
        "        took = time.monotonic() - began\n"
        "        (good,) = await ask(toolbox, ('good', '{}'))\n"
        "        pids.add(good.text)\n"
        "        print(name, found.is_error, took < 20, ' '.join(found.text.split()))\n"
        "    await toolbox.close()\n"
        "asyncio.run(run())\n"
        "grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before\n"
        "print('end', len(pids), grown < 64 * 1024, sorted(pids))\n"
    )
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code, settings.model_dump_json()],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        cwd=folder,
        timeout=STARTED_S,
    )
    assert done.stderr == ""
    *told, end = done.stdout.splitlines()
    assert [line.split()[0] for line in told] == list(ways)
    for line, (name, expected) in zip(told, ways.items(), strict=True):
        assert line.startswith(f"{name} {expected != GOOD} True ") and expected in line
    assert end.startswith("end 1 True ['good ")


def test_bad_answers_of_a_command_cost_one_call_each(tmp_path: Path) -> None:
    command = [sys.executable, HOSTILE]
    settings = McpSettings(name="bad", command=command, max_answer_mb=1, max_restarts=0)
    check_hostile(settings.model_copy(update={"start_timeout_s": STARTED_S}), WAYS, tmp_path)


def test_bad_answers_over_http_cost_one_call_each(tmp_path: Path) -> None:
    with over_http(HOSTILE) as url:
        settings = McpSettings(name="bad", url=url, max_answer_mb=1, max_restarts=0)
        check_hostile(
            settings.model_copy(update={"start_timeout_s": STARTED_S}), OVER_HTTP, tmp_path
        )


def test_a_bad_answer_fails_its_own_call_and_no_other() -> None:
    """While others wait for theirs; several at once of each kind."""
    settings = McpSettings(
        name="bad",
        command=[sys.executable, HOSTILE],
        max_answer_mb=1,
        start_timeout_s=STARTED_S,
        max_restarts=0,
    )
    tools = build_tools(with_servers([settings]), ())

    async def talk() -> list[Observation]:
        toolbox = toolbox_of(tools)
        names = ["good", "huge", "good", "surrogates", "good", "id_last", "good"]
        seen = await asyncio.gather(*(toolbox.call(ToolCall(name, "{}"), TASK) for name in names))
        await toolbox.close()
        return seen

    seen = asyncio.run(talk())
    assert [one.is_error for one in seen] == [False, True] * 3 + [False]


@pytest.mark.smoke
def test_a_storm_of_restarts_ends(caplog: pytest.LogCaptureFixture) -> None:
    """A server that lists its tools once and then never starts again."""
    flag = (
        "import os, runpy, sys; sys.argv = sys.argv[1:]; path = sys.argv.pop()\n"
        "if os.path.exists(path): sys.exit('not again')\n"
        "open(path, 'w').close(); runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    with tempfile.TemporaryDirectory() as folder:
        settings = McpSettings(
            name="once",
            command=[sys.executable, "-c", flag, SCRIPT, f"{folder}/started"],
            start_timeout_s=STARTED_S,
            max_restarts=3,
        )
        tools = build_tools(with_servers([settings]), ())

        async def talk() -> None:
            toolbox = toolbox_of(tools)
            (crashed,) = await ask(toolbox, ("crash", ""))
            assert crashed.is_error
            with raises_code("mcp-ended"):
                await toolbox.call(ToolCall("about", ""), TASK)
            await toolbox.close()

        with caplog.at_level(logging.WARNING, logger="treegraft.extras.mcp.client"):
            asyncio.run(talk())
    told = [one.getMessage() for one in caplog.records if one.name == "treegraft.extras.mcp.client"]
    assert len(told) == 4 and "stays so after 3 restarts" in told[-1]
    assert "not again" in told[1].partition("Its last lines on stderr: ")[2]


@pytest.mark.smoke
def test_a_crash_is_reported_and_the_server_started_again(caplog: pytest.LogCaptureFixture) -> None:
    tools = build_tools(with_servers([over_stdio(max_restarts=1, tools=["crash", "about"])]), ())
    assert [tool.name for tool in tools] == ["crash", "about"]

    async def crash() -> None:
        toolbox = toolbox_of(tools)
        with caplog.at_level(logging.WARNING, logger="treegraft.extras.mcp.client"):
            first, crashed = await ask(toolbox, ("about", ""), ("crash", ""))
            assert (crashed.text, crashed.is_error) == (
                "the server of crash ended during the call",
                True,
            )
            again = await toolbox.tools["about"]("", TASK)
            assert first.text.split()[0] != again.split()[0]
            await ask(toolbox, ("crash", ""))
            with raises_code("mcp-ended"):
                await toolbox.call(ToolCall("about", ""), TASK)
        await toolbox.close()

    asyncio.run(crash())
    reported = [
        record.getMessage()
        for record in caplog.records
        if record.name == "treegraft.extras.mcp.client"
    ]
    assert "restart 1" in reported[0] and "Its last lines on stderr: the end is near" in reported[0]
    assert "stays so after 1 restarts" in reported[1]


@pytest.mark.parametrize(
    ("server", "code"),
    [
        ({"command": ["/nowhere/at-all"]}, "mcp-not-started"),
        (
            {"command": [sys.executable, "-c", "import sys; sys.exit('no licence')"]},
            "mcp-not-started",
        ),
        (
            {
                "command": [sys.executable, "-c", "import time; time.sleep(600)"],
                "start_timeout_s": 0.2,
            },
            "mcp-not-started",
        ),
        ({"url": "http://127.0.0.1:9/mcp"}, "mcp-not-started"),
        (
            {"command": ["x"], "env": ["MCP_UNSET_KEY"]},
            "key-unset",
        ),
        (
            {"url": "http://127.0.0.1:9/mcp", "token_env": "MCP_UNSET_KEY"},
            "key-unset",
        ),
    ],
)
def test_a_server_that_is_not_there_is_refused_before_the_run(
    server: dict[str, Any], code: str
) -> None:
    with raises_code(code):
        McpServer(McpSettings(name="x", **{"start_timeout_s": STARTED_S, **server}))
    assert not [thread for thread in threading.enumerate() if thread.name == "treegraft-mcp-x"]


@pytest.mark.parametrize(
    ("server", "said"),
    [
        (
            {"command": [sys.executable, "-c", "import sys; sys.exit('one\\ntwo\\nno licence')"]},
            "Connection closed. Its last lines on stderr: one | two | no licence",
        ),
        ({"command": ["no-such-command"]}, "there is no command 'no-such-command'"),
        ({"url": "http://127.0.0.1:9/mcp"}, "ConnectError: All connection attempts failed"),
    ],
)
def test_a_dead_server_is_told_in_one_sentence(server: dict[str, Any], said: str) -> None:
    with raises_code("mcp-not-started") as told:
        McpServer(McpSettings(name="x", start_timeout_s=STARTED_S, **server))
    assert str(told.value).startswith("tools.mcp: server 'x' (")
    assert said in str(told.value) and "ExceptionGroup" not in str(told.value)


def test_without_the_sdk_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with raises_code("package-missing"):
        McpServer(over_stdio())


@pytest.mark.parametrize(
    ("servers", "reason"),
    [
        ([{"name": "a"}], "has neither of command and url"),
        ([{"name": "a", "command": ["x"], "url": "http://y"}], "has both of command and url"),
        (
            [{"name": "a", "command": ["x"]}, {"name": "a", "command": ["y"]}],
            "expected each name once",
        ),
        ([{"name": "a", "url": "http://y", "env": ["K"]}], "env would have no effect beside url"),
        (
            [{"name": "a", "command": ["x"], "token_env": "K"}],
            "token_env would have no effect beside command",
        ),
        ([{"name": "a", "comand": ["x"]}], r"'tools\.mcp\[0\]\.comand'"),
    ],
)
def test_settings_that_make_no_server(servers: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(SettingError, match=reason):
        load_config({"tools": {"mcp": servers}})
    assert value_of(Config(), "tools.mcp") == []


def test_faults_within_a_list_of_tables_name_the_setting() -> None:
    with raises_code("invalid-setting", match=r"'tools\.mcp\[1\]\.max_restarts': got -1"):
        load_config(
            {
                "tools": {
                    "mcp": [
                        {"name": "a", "url": "http://x"},
                        {"name": "b", "url": "http://x", "max_restarts": -1},
                    ]
                }
            }
        )


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("getWeather", "get_weather"),
        ("read-file", "read_file"),
        ("add2", "add_two"),
        ("list_files", "list_files"),
        ("??", "tool"),
    ],
)
def test_names_become_tags(name: str, tag: str) -> None:
    assert tag_of(name) == tag


def test_a_single_text_is_the_whole_body() -> None:
    text = {"type": "string"}
    number = {"type": "integer"}
    for properties, parameter in (
        ({"q": text}, "q"),
        ({"q": number}, None),
        ({"q": text, "n": number}, None),
    ):
        signature = Signature.of_schema({"type": "object", "properties": properties})
        assert signature.text_parameter == parameter
    assert Signature.of_schema({"type": "object"}).text_parameter is None


def test_branches_over_a_server_name_the_setting_that_allows_them() -> None:
    class Writes:
        name = "write"
        description = "Writes."
        capability = Capability.NONE
        cacheable = False

    config = Config()
    servers = [McpSettings(name="files", command=["x"]), McpSettings(name="web", url="http://h")]
    named = config.model_copy(update={"tools": config.tools.model_copy(update={"mcp": servers})})
    explorer = EntropyBranching(EntropySettings(), vocab_size=10)
    tools: Any = [Writes()]
    (found,) = check(named, explorer, tools, None)
    assert 'capability = "stateless" in its entry of tools.mcp' in found.text
