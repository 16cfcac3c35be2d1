"""Tool workers on a local Ray cluster: the observations are those of a toolbox in one process."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.parts import Counter, cluster, describe, kill, needs_ray, place_of

from treegraft.core.errors import SettingError, ToolUnavailable
from treegraft.core.interfaces import signature_of
from treegraft.core.types import Observation, Task, ToolCall
from treegraft.extras.ray.actors import start
from treegraft.extras.ray.pool import Pool
from treegraft.extras.ray.tools import RemoteTool, ToolWorker, remote_tools
from treegraft.settings.config import Config
from treegraft.settings.load import load_config
from treegraft.tools.build import build_tools
from treegraft.tools.toolbox import Toolbox

pytestmark = [needs_ray, pytest.mark.slow]
TASK = Task(id="t/1", question="why?", reference=("so",), columns={"n": 7})
USED = ["tests.cluster.parts:Counter", "python", "tests.cluster.parts:Odd"]


def settings(tmp_path: Path, **tools: Any) -> Config:
    own = {"use": USED, "deadline_s": 5.0, "num_retries": 1, "backoff_s": 0.01, **tools}
    return load_config(
        {"tools": own, "run": {"dir": str(tmp_path)}, "cluster": {"tool_workers": 2}}
    )


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Config]:
    found = settings(tmp_path_factory.mktemp("runs"))
    with cluster(found):
        yield found


@pytest.fixture(scope="module")
def workers(config: Config) -> list[Any]:
    place = place_of(config)
    return [start(ToolWorker, "tools", n, place, {"num_cpus": 1}) for n in range(2)]


def test_observations_are_those_of_one_process(
    config: Config, workers: list[Any], tmp_path: Path
) -> None:
    bodies = [
        ("odd", "say it"),
        ("odd", "lone \ud800 surrogate"),
        ("odd", "error no such page"),
        ("odd", "error"),
        ("odd", "fault key"),
        ("odd", "cancel"),
        ("odd", "times longer than the cap"),
        ("python", "print(6 * 7)"),
        ("python", "1 / 0"),
        ("nothing", "x"),
        ("counter", ""),
        ("counter", ""),
    ]

    async def seen(tools: list[Any]) -> list[Observation | str]:
        box, found = Toolbox(tools, config.tools), list[Observation | str]()
        for name, body in bodies:
            found.append(await box.call(ToolCall(name, body), TASK))
        try:
            await box.call(ToolCall("odd", "down for now"), TASK)
        except ToolUnavailable as error:
            found.append(str(error))
        await box.close()
        return found

    pool = Pool(workers, "tool workers", 30.0)
    remote = remote_tools(describe(workers[0]), pool, 60.0, config.tools, ())
    local = build_tools(config.tools, ())
    assert [tool.name for tool in remote] == [tool.name for tool in local]
    assert [isinstance(tool, RemoteTool) for tool in remote] == [False, True, True]
    for mine, other in zip(remote, local, strict=True):
        assert mine.description == other.description and mine.cacheable == other.cacheable
        assert signature_of(mine) == signature_of(other) and mine.capability == other.capability
        assert getattr(mine, "fingerprint", "") == getattr(other, "fingerprint", "")
    found = asyncio.run(seen(remote))
    assert found == asyncio.run(seen(local))
    assert Observation(text="42") in found and found[-1] == "for now"
    assert isinstance(remote[0], Counter) and remote[0].count == 2


def test_a_call_that_is_too_slow_is_read_as_such(config: Config, workers: list[Any]) -> None:
    place = place_of(settings(Path(config.run.dir), deadline_s=0.5))
    worker = start(ToolWorker, "tools", 7, place, {"num_cpus": 0})
    box = Toolbox(
        remote_tools(
            describe(worker), Pool([worker], "tool workers", 30.0), 60.0, config.tools, ()
        ),
        config.tools,
    )
    seen = asyncio.run(box.call(ToolCall("odd", "sleep /dev/null"), TASK))
    assert seen == Observation(text="the call timed out after 0.5 s", is_error=True)
    kill(worker)


def test_a_call_moves_when_its_worker_dies(
    config: Config, workers: list[Any], tmp_path: Path
) -> None:
    log = tmp_path / "pids"

    async def call_and_kill() -> Observation:
        pool = Pool(workers, "tool workers", 30.0)
        tools = remote_tools(describe(workers[0]), pool, 60.0, config.tools, ())
        box = Toolbox(tools, config.tools)
        calling = asyncio.create_task(box.call(ToolCall("odd", f"sleep {log}"), TASK))
        deadline = time.monotonic() + 20
        while not log.exists():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        os.kill(int(log.read_text(encoding="utf-8").split()[0]), signal.SIGKILL)
        return await calling

    assert asyncio.run(call_and_kill()) == Observation(text="slept")
    first, second = log.read_text(encoding="utf-8").split()
    assert first != second
    # The dead one is back, as a process of its own.
    for worker in workers:
        assert len(asyncio.run(Pool([worker], "tool workers", 30.0).ask("describe"))) == 3


def test_without_a_worker_the_service_is_down(config: Config) -> None:
    worker = start(ToolWorker, "tools", 8, place_of(config), {"num_cpus": 0})
    facts = describe(worker)
    kill(worker)
    pool = Pool([worker], "tool workers", 1.5)
    tools = remote_tools(facts, pool, 60.0, config.tools, ())
    with pytest.raises(ToolUnavailable, match=r"no answer within 1\.5 s"):
        asyncio.run(Toolbox(tools, config.tools).call(ToolCall("odd", "say"), TASK))
    # One in its place is asked from then on.
    other = start(ToolWorker, "tools", 8, place_of(config), {"num_cpus": 0})
    assert describe(other) == facts
    pool.take([other])
    seen = asyncio.run(Toolbox(tools, config.tools).call(ToolCall("odd", "say"), TASK))
    assert seen == Observation(text="say why? 7")
    kill(other)


def test_tools_that_cannot_be_made_are_said(config: Config) -> None:
    bad = settings(Path(config.run.dir), use=["tests.cluster.parts:NoSuch"])
    worker = start(ToolWorker, "tools", 9, place_of(bad), {"num_cpus": 0})
    with pytest.raises(SettingError, match="NoSuch"):
        describe(worker)
    kill(worker)
