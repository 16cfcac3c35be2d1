"""What the toolbox does for tools behind a service, and against tools that misbehave."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.error_codes import raises_code

from treegraft.core.errors import ToolError, ToolUnavailable
from treegraft.core.interfaces import Capability
from treegraft.core.types import Observation, Task, ToolCall
from treegraft.settings.tools import ToolsSettings
from treegraft.tools import toolbox
from treegraft.tools.toolbox import Toolbox

TASK = Task(id="t/1", question="?", reference=())


class Service:
    """A remote tool around a function of the number of its runs and the body."""

    name = "service"
    description = "A service."
    capability = Capability.STATELESS
    cacheable = True
    fingerprint = "v1"

    def __init__(
        self, answer: Callable[[int, str], Awaitable[Any]], *, is_remote: bool = True
    ) -> None:
        self.is_remote = is_remote
        self.num_runs = 0
        self.times: list[float] = []
        self._answer = answer

    async def __call__(self, body: str, task: Task) -> str:
        self.num_runs += 1
        self.times.append(time.monotonic())
        text: str = await self._answer(self.num_runs, body)
        return text

    async def close(self) -> None:
        """Nothing to release."""


async def echo(run: int, body: str) -> str:
    return f"{body}!"


def failing(num_times: int) -> Callable[[int, str], Awaitable[str]]:
    async def answer(run: int, body: str) -> str:
        if run <= num_times:
            raise ToolUnavailable("503")
        return body

    return answer


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolbox, "BACKOFF_S", 0.01)


def box_of(tool: Any, **settings: Any) -> Toolbox:
    return Toolbox([tool], ToolsSettings(**{"deadline_s": 5.0, **settings}))


def ask(tool: Any, *bodies: str, **settings: Any) -> tuple[list[Observation], dict[str, float]]:
    async def run() -> tuple[list[Observation], dict[str, float]]:
        box = box_of(tool, **settings)
        try:
            return [
                await box.call(ToolCall(tool.name, body), TASK) for body in bodies
            ], box.take_metrics()
        finally:
            await box.close()

    return asyncio.run(run())


def test_a_remote_tool_is_tried_again() -> None:
    tool = Service(failing(2))
    observations, metrics = ask(tool, "q")
    assert observations == [Observation(text="q")]
    assert tool.num_runs == 3
    assert metrics["time/tool_service_retries"] == 2
    assert (metrics["tools/service_calls"], metrics["tools/service_failure_frac"]) == (1, 0)


def test_a_dead_service_is_unavailable_and_a_local_tool_is_tried_once() -> None:
    for tool, num_runs in ((Service(failing(99)), 3), (Service(failing(99), is_remote=False), 1)):
        with pytest.raises(ToolUnavailable, match="503"):
            ask(tool, "q")
        assert tool.num_runs == num_runs


def test_what_the_agent_did_wrong_is_not_tried_again() -> None:
    async def refuse(run: int, body: str) -> str:
        raise ToolError("no such page")

    tool = Service(refuse)
    assert ask(tool, "q")[0] == [Observation(text="no such page", is_error=True)]
    assert tool.num_runs == 1


def test_retries_end_before_the_deadline_as_a_failure_of_the_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(toolbox, "BACKOFF_S", 0.4)
    tool = Service(failing(99))
    with pytest.raises(ToolUnavailable, match="503"):
        ask(tool, "q", deadline_s=1.0)
    # 0.4 fits; 0.4 + 0.8 does not.
    assert tool.num_runs == 2


def test_results_outlive_the_run_and_errors_do_not(tmp_path: Path) -> None:
    async def fail_on_odd(run: int, body: str) -> str:
        if body == "bad":
            raise ToolError("bad")
        return f"{body}\ud800 {run}"

    path = str(tmp_path / "deep" / "cache.sqlite")
    first = Service(fail_on_odd)
    second = Service(fail_on_odd)
    before, _ = ask(first, "a", "bad", "a", cache_path=path)
    after, metrics = ask(second, "a", "bad", cache_path=path)
    assert before[0] == before[2] == after[0] == Observation(text="a\ud800 1")
    assert after[1].is_error
    assert (first.num_runs, second.num_runs) == (2, 1)
    assert metrics["time/tool_service_cached_frac"] == 0.5
    with sqlite3.connect(path) as database:
        assert database.execute("SELECT tool, body FROM results").fetchall() == [("service", '"a"')]
    database.close()


def test_a_result_of_other_circumstances_is_not_taken(tmp_path: Path) -> None:
    path = str(tmp_path / "cache.sqlite")
    ask(Service(echo), "a", cache_path=path)
    other = Service(echo)
    other.fingerprint = "v2"
    unnamed = Service(echo)
    unnamed.fingerprint = ""
    for tool in (other, unnamed):
        ask(tool, "a", cache_path=path)
        assert tool.num_runs == 1


@pytest.mark.parametrize("text", ['"a', None])
def test_a_damaged_result_is_computed_again(text: str | None, tmp_path: Path) -> None:
    path = str(tmp_path / "cache.sqlite")
    ask(Service(echo), "a", cache_path=path)
    with sqlite3.connect(path) as database:
        database.execute("UPDATE results SET text = ?", (text,))
    database.close()
    tools = Service(echo), Service(echo)
    for tool in tools:
        assert ask(tool, "a", cache_path=path)[0] == [Observation(text="a!")]
    assert [tool.num_runs for tool in tools] == [1, 0]


def test_a_cache_that_cannot_be_used_is_refused_before_work_starts(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.sqlite"
    damaged.write_bytes(b"no database, but long enough to be looked at" * 99)
    with raises_code("cache-not-opened"):
        box_of(Service(echo), cache_path=str(damaged))


# Faults
