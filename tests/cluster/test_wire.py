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
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load
from tests.support.error_codes import raises_code

from treegraft.core.errors import DataError, DriftError
from treegraft.core.sessions import COUNTS
from treegraft.core.types import Completion, EntropyKind, StopReason, Task, ToolCall
from treegraft.extras.ray.actors import error_reply, replying, value_of
from treegraft.extras.ray.engines import PIECE_BYTES, Weights, completion_of, pieces_of
from treegraft.extras.ray.placement import lasting
from treegraft.extras.ray.supervisor import MAX_DEATHS, SLOW_LOOKS, Keeper, Member, State
from treegraft.runs.checkpoint import prune_checkpoints, tidy
from treegraft.runs.roles import roles_line
from treegraft.settings.config import Config
from treegraft.settings.tools import ToolsSettings
from treegraft.tools.function import FunctionTool
from treegraft.tools.toolbox import Toolbox

FLOATS = st.floats(allow_nan=False)


@given(st.lists(st.tuples(st.integers(0, 1 << 20), FLOATS, FLOATS)), st.sampled_from(StopReason))
def test_a_completion_arrives_as_it_was(
    tokens: list[tuple[int, float, float]], finish: StopReason
) -> None:
    ids, logprobs, entropies = zip(*tokens, strict=True) if tokens else ((), (), ())
    sent = Completion(
        token_ids=ids,
        sampling_logprobs=logprobs,
        entropies=entropies,
        entropy_kind=EntropyKind.EXACT,
        finish=finish,
        policy_version=7,
    )
    assert completion_of(json.loads(json.dumps(asdict(sent)))) == sent


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
    with raises_code("weights-drift", kind=DriftError, match="apart"):
        value_of(error_reply(DriftError("apart", code="weights-drift")))


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
        self.trees, self.orders = list(trees), list[dict[str, Any]]()
        self.taken: list[tuple[int, int, str]] = []
        self.is_broken = False
        for name in ("state", "open", "publish", "grow"):
            setattr(self, name, SimpleNamespace(remote=getattr(self, f"_{name}")))

    async def _state(self) -> str:
        said = {"host": "here", "pid": 1, "said": [], "is_broken": self.is_broken}
        return json.dumps(said)

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
    return json.dumps({"value": {"tree": "grown", "requests": 5}})


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The handles that rank 0 has killed; nothing of Ray's runs."""
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    found: list[Any] = []
    monkeypatch.setattr(ray, "put", lambda piece: piece)
    monkeypatch.setattr(ray, "kill", found.append)
    monkeypatch.setattr(ray, "cancel", lambda answer: None)
    return found


def keeper_of(*handles: Any) -> Keeper:
    """A keeper whose engines live."""
    keeper = Keeper(Config())
    keeper.engines = [Member(n, partial(next, iter([one]))) for n, one in enumerate(handles)]
    for member in keeper.engines:
        member.state, member.opened = State.LIVE, {"fingerprint": "at the beginning"}
    return keeper


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20.0):
        while not condition():
            await asyncio.sleep(0.01)


def test_trees_grow_where_the_fewest_do_and_again_where_an_engine_is_lost(
    killed: list[Any],
) -> None:
    first, second = Handle(), Handle(done, done)

    async def grow() -> tuple[Any, dict[str, float]]:
        keeper = keeper_of(first, second)
        tasks = [asyncio.create_task(keeper.grown({"key": [n]}, f"0/{n}")) for n in range(2)]
        await until(lambda: len(first.orders) == len(second.orders) == 1)
        keeper._lose(keeper.engines[0], "it is gone")
        assert keeper.engines[0].num_trees == 1
        return await asyncio.gather(*tasks), keeper.take_metrics()

    found, metrics = asyncio.run(grow())
    assert [one["tree"] for one in found] == ["grown", "grown"]
    # The same order, from its key.
    assert first.orders == [{"key": [0], "edition": 0, "max_context": None}]
    assert second.orders == [{**first.orders[0], "key": [1]}, first.orders[0]]
    assert metrics["time/engine_requests"] == 10.0 and metrics["time/engine_restarts"] == 1.0


def test_a_tree_that_ends_its_engines_is_named(killed: list[Any]) -> None:
    """An engine that is drained is no death, and neither is that of a tree elsewhere."""
    ray = pytest.importorskip("ray", reason="Ray is not installed")

    def die() -> str:
        raise ray.exceptions.ActorDiedError

    def refuse() -> str:
        return error_reply(DataError("no prompt", code="prompt-too-long"))

    async def grow(*handles: Handle) -> None:
        keeper = keeper_of(*handles)
        growing = asyncio.create_task(keeper.grown({}, "0/a"))
        if not handles[0].trees:
            await until(lambda: handles[0].orders)
            keeper.drain(keeper.engines[0], "it is slow")
        await growing

    with raises_code("engines-died", match="tree 0/a"):
        asyncio.run(grow(*(Handle(die) for _ in range(MAX_DEATHS))))
    asyncio.run(grow(Handle(), *(Handle(die) for _ in range(MAX_DEATHS - 1)), Handle(done)))
    with raises_code("prompt-too-long", kind=DataError):
        asyncio.run(grow(Handle(refuse)))


def test_a_lost_engine_is_made_anew_and_gets_the_weights_that_are_due(killed: list[Any]) -> None:
    broken, new = Handle(), Handle()

    async def attend() -> Member:
        keeper = Keeper(Config())
        member = Member(0, partial(next, iter([broken, new])))
        keeper.engines = [member]
        await keeper._first(member)
        await keeper.publish(Weighing("first"), 3)
        broken.is_broken = True
        await keeper._attend(member)
        assert member.state is State.DOWN and keeper._answering() == []
        await keeper._attend(member)
        assert keeper._answering() == [member]
        return member

    member = asyncio.run(attend())
    assert killed == [broken] and member.num_starts == 2
    assert broken.taken == new.taken == [(1, 3, "first")]


def test_the_last_engine_is_waited_for_however_long_it_had_lived(killed: list[Any]) -> None:
    keeper = keeper_of(Handle())
    keeper._last_live -= 2 * keeper.config.engine.deadline_s
    assert keeper.death is None
    keeper._lose(keeper.engines[0], "it is gone")
    assert keeper.death is None
    keeper._last_live -= keeper.config.engine.deadline_s
    with raises_code("no-engine-left", match="engine 0: it is gone"):
        asyncio.run(keeper.grown({}, "0/a"))


def test_the_slow_engine_is_drained() -> None:
    """100, 100 and 20 tokens in 10 s of requests: a fifth of the median of the others."""

    async def watch() -> tuple[list[State], list[int]]:
        keeper = keeper_of(None, None, None)
        for look in range(1, SLOW_LOOKS + 1):
            for member, tokens in zip(keeper.engines, (100, 100, 20), strict=True):
                member.seen["sampled"] = [tokens * look, 10.0 * look]
            keeper.drain_slow()
        answering = [one.number for one in keeper._answering()]
        return [one.state for one in keeper.engines], answering

    states, answering = asyncio.run(watch())
    assert states == [State.LIVE, State.LIVE, State.DRAINED]
    assert answering == [0, 1]


class Weighing(Source):
    """Small weights that are told apart by a word."""

    def __init__(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self.tensors, self.names = {"weight": torch.ones(1)}, ["weight"]


def test_each_publish_reaches_an_engine_however_long_it_takes(
    killed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warm-up publishes version 0 twice, with other weights. Meanwhile the engine is looked at,
    which has to say something within a shorter time than weights take."""
    monkeypatch.setattr("treegraft.extras.ray.supervisor.STATE_S", 0.1)
    handle = Handle()

    async def publish() -> tuple[State, int, int]:
        keeper = keeper_of(handle)
        (member,) = keeper.engines
        for fingerprint in ("first", "second"):
            await asyncio.gather(keeper.publish(Weighing(fingerprint), 0), keeper._attend(member))
        return member.state, keeper.due.edition, keeper.policy_version

    assert asyncio.run(publish()) == (State.LIVE, 2, 0)
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
        own, taken = there.take_metrics(), here.take_metrics()
        await there.close()
        await here.close()
        return own, taken, here.take_metrics()

    own, taken, after = asyncio.run(run())
    assert own["tools/length_calls"] == after["tools/length_calls"] == 0.0
    assert taken["tools/length_calls"] == 2.0
    assert taken["tools/length_failure_frac"] == 0.5


def test_roles_in_a_line(tmp_path: Path) -> None:
    roles = [
        {"role": "engine", "number": 0, "state": "live", "waits": {}},
        {"role": "engine", "number": 1, "state": "down", "waits": {}},
        {"role": "grower", "number": 0, "state": "live", "waits": {"engine": 3}},
        {"role": "grower", "number": 1, "state": "live", "waits": {"engine": 1, "tool a": 2}},
    ]
    path = tmp_path / "roles.json"
    path.write_text(json.dumps({"written": 1000.0, "roles": roles}))
    line = "2 x engine, 2 x grower; engine 1 is down; waiting for engine (4), tool a (2)"
    assert roles_line(path, 1010.0) == line
    assert roles_line(path, 1031.0) == ""
    path.write_text('{"written": 1000.0, "roles": [{}]}')
    assert roles_line(path, 1010.0) == ""
    assert roles_line(tmp_path / "missing") == ""
