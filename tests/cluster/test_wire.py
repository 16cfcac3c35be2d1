"""What travels between the actors of a run, without any of them."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load
from tests.error_codes import raises_code

from treegraft.core.errors import DataError, DriftError
from treegraft.core.interfaces import Request
from treegraft.core.sessions import COUNTS
from treegraft.core.types import Completion, EntropyKind, Sampling, StopReason, Task, ToolCall
from treegraft.extras.ray.actors import error_reply, replying, value_of
from treegraft.extras.ray.engines import (
    PIECE_BYTES,
    Weights,
    completion_of,
    pieces_of,
    request_to_json,
)
from treegraft.extras.ray.placement import lasting
from treegraft.extras.ray.remote_engine import ClusterEngine
from treegraft.extras.ray.supervisor import SLOW_LOOKS, Keeper, Member, State
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


class Answers:
    """An engine's handle whose requests end as the test says, without Ray."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers = answers
        self.asked: list[dict[str, Any]] = []
        self.complete = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self.stream))

    async def stream(self, request: str) -> Any:
        self.asked.append(json.loads(request))
        for answer in self.answers:
            yield _given(answer)


async def _given(answer: dict[str, Any]) -> str:
    return json.dumps(answer)


DONE = {
    "value": {
        "token_ids": [5],
        "sampling_logprobs": [-0.5],
        "entropies": [0.25],
        "entropy_kind": "exact",
        "finish": "end",
        "policy_version": 3,
    }
}


def test_a_request_moves_from_an_engine_without_the_weights() -> None:
    """Both engines are free, so the first is asked first; what it had probed is not told twice."""
    pytest.importorskip("ray", reason="Ray is not installed")
    old = Answers({"value": {"probe": [0.25]}}, {"value": {"stale": 2}})
    new = Answers({"value": {"probe": [0.25]}}, DONE)
    told: list[Sequence[float]] = []

    async def ask() -> tuple[Completion, dict[str, float]]:
        engine = ClusterEngine(Config(), max_context=None)
        engine.take(3, 3, {0: old, 1: new})
        done = await engine.complete(
            Request(
                [1, 2],
                Sampling(max_new_tokens=4),
                noise_key=(0, "a"),
                probe_tokens=1,
                on_probe=told.append,
            )
        )
        # The tree keeps to the engine that answered.
        await engine.complete(Request([1], Sampling(max_new_tokens=4), noise_key=(0, "b")))
        return done, engine.take_metrics()

    done, metrics = asyncio.run(ask())
    assert done.token_ids == (5,) and told == [(0.25,)]
    assert metrics == {
        "time/engine_requests": 3.0,
        "time/engine_moved": 1.0,
        "time/engine_stale": 1.0,
    }
    assert (len(old.asked), len(new.asked)) == (1, 2)
    request = Request([1, 2], Sampling(max_new_tokens=4), (0, "a"), 1, told.append)
    asked = json.loads(request_to_json(request, 3))
    assert old.asked[0] == new.asked[0] == asked


def test_an_engine_that_refuses_is_not_asked_again() -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    refusing = Answers(
        {"error": "EngineError", "code": "prefix-empty", "text": "the prefix is empty"}
    )

    async def ask() -> None:
        engine = ClusterEngine(Config(), max_context=None)
        engine.take(0, 0, {0: refusing})
        await engine.complete(Request([], Sampling(max_new_tokens=4), noise_key=(0, "a")))

    with raises_code("prefix-empty"):
        asyncio.run(ask())
    assert len(refusing.asked) == 1


def test_the_slow_engine_is_drained() -> None:
    """100, 100 and 20 tokens in 10 s of requests: a fifth of the median of the others."""

    async def watch() -> tuple[list[State], list[int]]:
        keeper = Keeper(Config())
        keeper.engines = [_member(number) for number in range(3)]
        for look in range(1, SLOW_LOOKS + 1):
            for member, tokens in zip(keeper.engines, (100, 100, 20), strict=True):
                member.seen["sampled"] = [tokens * look, 10.0 * look]
            keeper.drain_slow()
        answering = [one.number for one in keeper._answering()]
        return [one.state for one in keeper.engines], answering

    states, answering = asyncio.run(watch())
    assert states == [State.LIVE, State.LIVE, State.DRAINED]
    assert answering == [0, 1]


def _member(number: int, handle: Any = None) -> Any:
    member = Member("engine", number, lambda: handle)
    member.state, member.opened = State.LIVE, {"fingerprint": "at the beginning"}
    return member


class Weighing(Source):
    """Small weights that are told apart by a word."""

    def __init__(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self.tensors, self.names = {"weight": torch.ones(1)}, ["weight"]


class Taking:
    """An engine's handle that says at once how it is, and takes its time over weights."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, int, str]] = []
        self.state = SimpleNamespace(remote=self._state)
        self.publish = SimpleNamespace(remote=self._publish)

    async def _state(self) -> str:
        return json.dumps({"host": "here", "pid": 1, "said": []})

    async def _publish(self, *weights: Any) -> str:
        due = Weights(*weights)
        await asyncio.sleep(0.3)
        self.taken.append((due.edition, due.version, due.fingerprint))
        return json.dumps({"value": due.fingerprint})


def test_each_publish_reaches_an_engine_however_long_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A warm-up publishes version 0 twice, with other weights. Meanwhile the engine is looked at,
    which has to say something within a shorter time than weights take."""
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    killed: list[Any] = []
    monkeypatch.setattr(ray, "put", lambda piece: piece)
    monkeypatch.setattr(ray, "kill", lambda handle, **_: killed.append(handle))
    monkeypatch.setattr("treegraft.extras.ray.supervisor.STATE_S", 0.1)
    handle = Taking()

    async def publish() -> tuple[State, int, int]:
        keeper = Keeper(Config())
        member = _member(0, handle)
        keeper.engines = [member]
        for fingerprint in ("first", "second"):
            await asyncio.gather(keeper.publish(Weighing(fingerprint), 0), keeper._attend(member))
        return member.state, keeper.edition, keeper.policy_version

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
