"""What travels between the actors of a run, without any of them."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import load
from tests.support.error_codes import raises_code

from treegraft.core.errors import DataError
from treegraft.core.sessions import COUNTS
from treegraft.core.types import Task, ToolCall
from treegraft.extras.ray.actor import (
    PIECE_BYTES,
    Weights,
    pieces_of,
    replying,
    value_of,
)
from treegraft.extras.ray.placement import lasting
from treegraft.extras.ray.supervisor import MAX_DEATHS, Member, Supervisor
from treegraft.runs.checkpoint import prune_checkpoints, tidy
from treegraft.settings.config import Config
from treegraft.settings.tools import ToolsSettings
from treegraft.tools.function import FunctionTool
from treegraft.tools.toolbox import Toolbox

FLOATS = st.floats(allow_nan=False)


def test_errors_of_ours_arrive_with_their_kind() -> None:
    class Part:
        @replying
        async def good(self, number: int) -> int:
            return number + 1

        @replying
        async def bad(self) -> None:
            raise DataError("the file is empty", code="no-rows-in-file")

    assert value_of(asyncio.run(Part().good(1))) == 2
    with raises_code("no-rows-in-file", kind=DataError, match="the file is empty"):
        value_of(asyncio.run(Part().bad()))


class Source:
    """Weights of which two share their memory."""

    fingerprint = "abc"

    def __init__(self) -> None:
        tied = torch.arange(6.0).reshape(2, 3)
        large = torch.ones(PIECE_BYTES // 4)
        self.tensors = {"in": tied, "large": large, "out": tied, "turned": tied.T}
        self.names: Sequence[str] = list(self.tensors)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self.tensors.items())


def test_weights_travel_in_pieces() -> None:
    source = Source()
    pieces = [load(piece) for piece in pieces_of(source)]
    assert [sorted(piece) for piece in pieces] == [["in", "large"], ["out", "turned"]]
    for piece in pieces:
        for name, tensor in piece.items():
            assert torch.equal(tensor, source.tensors[name])


class Handle:
    """An engine as rank 0 holds it: it says at once how it is, takes its time over weights, and its
    trees end as the test says."""

    def __init__(self, *trees: Any) -> None:
        """Args: trees: what each order is answered with, a function of it; later ones never are."""
        self.trees = list(trees)
        self.orders = list[dict[str, Any]]()
        self.taken: list[tuple[int, int, str]] = []
        self.is_dead = False
        for name in ("state", "open", "publish", "grow"):
            setattr(self, name, SimpleNamespace(remote=getattr(self, f"_{name}")))

    async def _state(self) -> str:
        return json.dumps({"host": "here", "said": [], "is_dead": self.is_dead})

    async def _open(self) -> str:
        return json.dumps({"value": {"max_context": 64, "fingerprint": "at the beginning"}})

    async def _publish(self, *weights: Any) -> str:
        due = Weights(*weights)
        await asyncio.sleep(0.3)
        self.taken.append((due.edition, due.version, due.fingerprint))
        return json.dumps({"value": due.fingerprint})

    async def _grow(self, order: str) -> str:
        self.orders.append(json.loads(order))
        if not self.trees:
            await asyncio.sleep(60.0)
        return str(self.trees.pop(0)())


def done() -> str:
    return json.dumps({"value": {"tree": "grown"}})


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The handles that rank 0 has killed; nothing of Ray's runs."""
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    found: list[Any] = []
    monkeypatch.setattr(ray, "put", lambda piece: piece)
    monkeypatch.setattr(ray, "kill", found.append)
    monkeypatch.setattr(ray, "cancel", lambda answer: None)
    return found


def supervisor_of(*handles: Any) -> Supervisor:
    """A supervisor whose engines live."""
    supervisor = Supervisor(Config())
    supervisor.engines = [Member(n, partial(next, iter([one]))) for n, one in enumerate(handles)]
    for member in supervisor.engines:
        member.is_live = True
        member.opened = {"fingerprint": "at the beginning"}
    return supervisor


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20.0):
        while not condition():
            await asyncio.sleep(0.01)


def test_trees_grow_where_the_fewest_do_and_again_where_an_engine_is_lost(
    killed: list[Any],
) -> None:
    first = Handle()
    second = Handle(done, done)

    async def grow() -> tuple[Any, dict[str, float]]:
        supervisor = supervisor_of(first, second)
        tasks = [asyncio.create_task(supervisor.grown({"key": [n]}, f"0/{n}")) for n in range(2)]
        await until(lambda: len(first.orders) == len(second.orders) == 1)
        supervisor._lose(supervisor.engines[0], "it is gone")
        assert supervisor.engines[0].num_trees == 1
        return await asyncio.gather(*tasks), supervisor.take_metrics()

    found, metrics = asyncio.run(grow())
    assert [one["tree"] for one in found] == ["grown", "grown"]
    # The same order, from its key.
    assert first.orders == [{"key": [0], "edition": 0}]
    assert second.orders == [{**first.orders[0], "key": [1]}, first.orders[0]]
    assert (metrics["time/engine_servers"], metrics["time/engine_restarts"]) == (1.0, 1.0)


def test_a_tree_that_ends_its_engines_is_named(killed: list[Any]) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed")

    def die() -> str:
        raise ray.exceptions.ActorDiedError

    def refuse() -> str:
        said = {"error": "DataError", "code": "prompt-too-long", "text": "no prompt"}
        return json.dumps(said)

    async def grow(*handles: Handle) -> None:
        await supervisor_of(*handles).grown({}, "0/a")

    with raises_code("engines-died", match="tree 0/a"):
        asyncio.run(grow(*(Handle(die) for _ in range(MAX_DEATHS))))
    asyncio.run(grow(*(Handle(die) for _ in range(MAX_DEATHS - 1)), Handle(done)))
    with raises_code("prompt-too-long", kind=DataError):
        asyncio.run(grow(Handle(refuse)))


def test_a_lost_engine_is_made_anew_and_gets_the_weights_that_are_due(killed: list[Any]) -> None:
    broken = Handle()
    new = Handle()

    async def attend() -> Member:
        supervisor = Supervisor(Config())
        member = Member(0, partial(next, iter([broken, new])))
        supervisor.engines = [member]
        await supervisor._first(member)
        await supervisor.publish(Weighing("first"), 3)
        broken.is_dead = True
        await supervisor._attend(member)
        assert not member.is_live and supervisor._answering() == []
        await supervisor._attend(member)
        assert supervisor._answering() == [member]
        return member

    member = asyncio.run(attend())
    assert killed == [broken] and member.is_live
    assert broken.taken == new.taken == [(1, 3, "first")]


def test_the_last_engine_is_waited_for_however_long_it_had_lived(killed: list[Any]) -> None:
    supervisor = supervisor_of(Handle())
    supervisor._last_live -= 2 * supervisor.config.engine.deadline_s
    assert supervisor.death is None
    supervisor._lose(supervisor.engines[0], "it is gone")
    assert supervisor.death is None
    supervisor._last_live -= supervisor.config.engine.deadline_s
    with raises_code("no-engine-left", match="engine 0: it is gone"):
        asyncio.run(supervisor.grown({}, "0/a"))


class Weighing(Source):
    """Small weights that are told apart by a word."""

    def __init__(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self.tensors = {"weight": torch.ones(1)}
        self.names = ["weight"]


def test_each_publish_reaches_an_engine_however_long_it_takes(
    killed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warm-up publishes version 0 twice, with other weights. Meanwhile the engine is looked at,
    which has to say something within a shorter time than weights take."""
    monkeypatch.setattr("treegraft.extras.ray.supervisor.STATE_S", 0.1)
    handle = Handle()

    async def publish() -> tuple[bool, int, int]:
        supervisor = supervisor_of(handle)
        (member,) = supervisor.engines
        for fingerprint in ("first", "second"):
            await asyncio.gather(
                supervisor.publish(Weighing(fingerprint), 0), supervisor._attend(member)
            )
        return member.is_live, supervisor.due.edition, supervisor.policy_version

    assert asyncio.run(publish()) == (True, 2, 0)
    assert handle.taken == [(1, 0, "first"), (2, 0, "second")] and killed == []


@pytest.mark.parametrize("has_links", [True, False])
def test_actors_keep_the_model_of_a_checkpoint_that_is_removed(
    has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no such names on this disk")

    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    files = ("model.safetensors", "treegraft/state.json", "treegraft/optimiser.safetensors")
    for name in ("update-000002", "update-000004"):
        for file in files:
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
    with lasting(tmp_path / "update-000002") as held:
        prune_checkpoints(tmp_path, keep=1)
        assert not (tmp_path / "update-000002").exists()
        assert [(held / file).exists() for file in files] == [True, True, False]
        assert (held / files[0]).read_text() == "update-000002"
    assert [path.name for path in tmp_path.iterdir()] == ["update-000004"]
    # Of a process that was killed, the next start removes it.
    with lasting(tmp_path / "update-000004") as held:
        tidy(tmp_path)
        assert not held.exists()


def test_calls_of_a_tree_are_counted_apart() -> None:
    """Two calls, one of them with a fault, are two calls in another process's toolbox."""

    def length(text: str) -> str:
        """Returns the length of a text."""
        return str(len(text) // (len(text) - 3))

    task = Task(id="a", question="?", reference=())

    async def run() -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
        there, here = (Toolbox([FunctionTool(length)], ToolsSettings()) for _ in range(2))
        apart: dict[str, Any] = {}

        async def grow() -> None:
            COUNTS.set(apart)
            for body in ("four", "two"):
                await there.call(ToolCall("length", body), task)

        await asyncio.create_task(grow())
        here.add_usage(json.loads(json.dumps({k: asdict(v) for k, v in apart.items()})))
        own = there.take_metrics()
        taken = here.take_metrics()
        await there.close()
        await here.close()
        return own, taken, here.take_metrics()

    own, taken, after = asyncio.run(run())
    assert own["tools/length_calls"] == after["tools/length_calls"] == 0.0
    assert taken["tools/length_calls"] == 2.0
    assert taken["tools/length_failure_frac"] == 0.5
