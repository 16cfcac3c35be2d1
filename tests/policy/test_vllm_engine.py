"""The engine "vllm" against servers of ours that answer as vLLM does: the same tokens as the native
engine whatever dies, and no reply by other weights."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tests.support.error_codes import raises_code
from tests.support.fake_vllm import FakeVllm, fakes
from tests.support.families import build_model, word_tokenizer
from tests.support.tiny import tiny

from treegraft.core.errors import EngineError
from treegraft.core.interfaces import Request
from treegraft.core.types import Completion, EntropyKind, Filters, Sampling, StopReason
from treegraft.extras.memory import pipe
from treegraft.extras.memory.pipe import buckets, parts_of
from treegraft.extras.memory.senders import Senders
from treegraft.policy.engine.native import NativeEngine
from treegraft.policy.engine.vllm import fleet, launch
from treegraft.policy.engine.vllm.build import (
    _environment,
    _folder_for_weights,
    build_engine,
    client,
    draws_by_vllm,
    find_python,
    gpus_of,
    options,
)
from treegraft.policy.engine.vllm.engine import VllmEngine
from treegraft.policy.engine.vllm.fleet import Fleet, State
from treegraft.policy.engine.vllm.folder import WeightsFolder, held_folder, write_folder
from treegraft.policy.engine.vllm.loading import CHANGED, Due, Held, give_weights
from treegraft.policy.engine.vllm.protocol import (
    likely_columns,
    packed,
    tail_bounds,
    unpacked,
)
from treegraft.policy.engine.vllm.server import Process, Server, Unreachable
from treegraft.policy.learn.learner import Learner
from treegraft.policy.load import with_adapters
from treegraft.policy.publish import Canaries, Publisher
from treegraft.policy.weights import ModelWeights, weights_fingerprint
from treegraft.runs.checkpoint import TrainState
from treegraft.settings.config import Config
from treegraft.settings.load import load_config

# transformers renames what peft asks for.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")

MODEL = build_model("llama", 0)
OTHER = build_model("llama", 1)
PREFIX = (1, 5, 9, 4)
LONG = Sampling(max_new_tokens=12)
Work = Callable[[VllmEngine], Awaitable[Any]]


def config_of(fakes: list[FakeVllm], folder: Path, **vllm: Any) -> Config:
    engine = {"kind": "vllm", "max_rows": 4, "deadline_s": 20.0}
    engine |= {name: vllm.pop(name) for name in ("max_rows", "deadline_s") if name in vllm}
    kind = vllm.pop("publish", "auto")
    vllm = {"servers": [one.url for one in fakes], "start_timeout_s": 10.0} | vllm
    return load_config(
        tiny(
            run={"dir": str(folder)},
            model={"lora": {"rank": 2 if kind == "adapter" else 0}},
            engine={**engine, "vllm": vllm},
            publish={"kind": kind},
        )
    )


def run(fakes: list[FakeVllm], folder: Path, work: Work, **vllm: Any) -> Any:
    config = config_of(fakes, folder, **vllm)

    async def main() -> Any:
        engine = build_engine(config, copy.deepcopy(MODEL), word_tokenizer(), "tiny")
        try:
            await engine.open()
            return await asyncio.wait_for(work(engine), 40.0)
        finally:
            await engine.close()

    return asyncio.run(main())


def key(number: int) -> tuple[int | str, ...]:
    """Of the only step of a tree of its own."""
    return (0, "train", 1, f"t{number}", "0")


async def ask(engine: Any, number: int, sampling: Sampling = LONG) -> Completion:
    return await engine.complete(Request(PREFIX, sampling, noise_key=key(number)))


def native(model: Any, numbers: range, sampling: Sampling = LONG) -> list[Completion]:
    """What the native engine writes for the same keys."""

    async def main() -> list[Completion]:
        settings = load_config(tiny()).engine
        engine = NativeEngine(copy.deepcopy(model), word_tokenizer(), settings)
        try:
            return await asyncio.gather(*(ask(engine, one, sampling) for one in numbers))
        finally:
            await engine.close()

    return asyncio.run(main())


def same(found: list[Completion], expected: list[Completion]) -> bool:
    """Whether tokens and ends are equal, and numbers within rounding."""
    for one, other in zip(found, expected, strict=True):
        assert (one.token_ids, one.finish) == (other.token_ids, other.finish)
        for ours, theirs in (
            (one.sampling_logprobs, other.sampling_logprobs),
            (one.entropies, other.entropies),
        ):
            assert torch.allclose(torch.tensor(ours), torch.tensor(theirs), atol=1e-5)
    return True


@pytest.mark.parametrize(
    "sampling",
    [
        LONG,
        Sampling(max_new_tokens=8, temperature=0.0),
        Sampling(max_new_tokens=8, temperature=0.7),
    ],
    ids=["sampled", "greedy", "cool"],
)
def test_tokens_are_those_of_the_native_engine(tmp_path: Path, sampling: Sampling) -> None:
    async def work(engine: VllmEngine) -> list[Completion]:
        return await asyncio.gather(*(ask(engine, one, sampling) for one in range(6)))

    with fakes(MODEL) as servers:
        found = run(servers, tmp_path, work)
    assert same(found, native(MODEL, range(6), sampling))


def test_stops_and_finals_end_as_in_the_native_engine(tmp_path: Path) -> None:
    plain = native(MODEL, range(8))
    words = [word_tokenizer().decode([one.token_ids[2]]).strip() for one in plain]
    sampling = Sampling(max_new_tokens=12, stop=tuple(words[:3]), final=tuple(words[3:5]))

    async def work(engine: VllmEngine) -> list[Completion]:
        return await asyncio.gather(*(ask(engine, one, sampling) for one in range(8)))

    with fakes(MODEL) as servers:
        found = run(servers, tmp_path, work)
    expected = native(MODEL, range(8), sampling)
    assert same(found, expected)
    assert any(
        len(one.token_ids) < len(other.token_ids) for one, other in zip(found, plain, strict=True)
    )


def test_a_probe_comes_early_and_changes_no_token(tmp_path: Path) -> None:
    seen: list[tuple[float, ...]] = []

    async def work(engine: VllmEngine) -> Completion:
        return await engine.complete(
            Request(
                PREFIX,
                LONG,
                noise_key=key(0),
                probe_tokens=3,
                on_probe=lambda x: seen.append(tuple(x)),
            )
        )

    with fakes(MODEL) as servers:
        found = run(servers, tmp_path, work)
        assert servers[0].num_requests == 2
    assert same([found], native(MODEL, range(1)))
    assert seen == [found.entropies[:3]]


def test_dead_servers_requests_move_and_nothing_changes(tmp_path: Path) -> None:
    """One of two dies in mid-rollout and comes back with its first weights; it is given those that
    are due before it answers again."""

    async def work(engine: VllmEngine) -> list[Completion]:
        await engine.publish(ModelWeights(OTHER.state_dict()), 1)
        asked = [asyncio.create_task(ask(engine, one)) for one in range(8)]
        while not servers[1].num_running:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(servers[1].die)
        found = await asyncio.gather(*asked)
        loads = servers[1].num_loads
        await asyncio.to_thread(servers[1].revive)
        while engine.capacity < 8:
            await asyncio.sleep(0.01)
        assert servers[1].num_loads == loads + 1
        metrics = engine.take_metrics()
        assert metrics["time/engine_moved"] > 0 and metrics["time/engine_restarts"] >= 1
        servers[0].token_s = servers[1].token_s = 0.0
        return [*found, *await asyncio.gather(*(ask(engine, one) for one in range(8, 12)))]

    with fakes(MODEL, 2, token_s=0.02) as servers:
        found = run(servers, tmp_path, work)
    assert {one.policy_version for one in found} == {1}
    assert same(found, native(OTHER, range(12)))


def test_no_reply_by_other_weights_is_taken(tmp_path: Path) -> None:
    """Somebody starts the only server anew between two requests, or publishes to it."""

    async def work(engine: VllmEngine) -> list[Completion]:
        await engine.publish(ModelWeights(OTHER.state_dict()), 1)
        first = await ask(engine, 0)
        servers[0].model.load_state_dict(MODEL.state_dict())
        servers[0].label = "default"
        second = await ask(engine, 1)
        assert engine.take_metrics()["time/engine_stale"] == 1.0
        return [first, second]

    with fakes(MODEL) as servers:
        found = run(servers, tmp_path, work)
    assert same(found, native(OTHER, range(2)))


def test_a_publish_waits_for_completions_and_holds_new_ones_back(tmp_path: Path) -> None:
    async def work(engine: VllmEngine) -> tuple[list[Completion], list[Completion]]:
        before = [asyncio.create_task(ask(engine, one)) for one in range(4)]
        while servers[0].num_running < 4:
            await asyncio.sleep(0.005)
        publishing = asyncio.create_task(engine.publish(ModelWeights(OTHER.state_dict()), 1))
        await asyncio.sleep(0)
        after = [asyncio.create_task(ask(engine, one)) for one in range(4, 8)]
        await publishing
        assert engine.fingerprint == weights_fingerprint(OTHER.state_dict())
        return await asyncio.gather(*before), await asyncio.gather(*after)

    with fakes(MODEL, token_s=0.01) as servers:
        before, after = run(servers, tmp_path, work)
    assert {one.policy_version for one in before} == {0}
    assert {one.policy_version for one in after} == {1}
    assert same(before, native(MODEL, range(4)))
    assert same(after, native(OTHER, range(4, 8)))


def test_a_server_gets_no_more_requests_than_it_has_rows(tmp_path: Path) -> None:
    async def work(engine: VllmEngine) -> int:
        assert engine.capacity == 8
        await asyncio.gather(*(ask(engine, one) for one in range(20)))
        return max(one.most_at_once for one in servers)

    with fakes(MODEL, 2, token_s=0.002) as servers:
        assert run(servers, tmp_path, work) == 4


def test_requests_of_a_tree_go_to_one_server(tmp_path: Path) -> None:
    async def work(engine: VllmEngine) -> list[int]:
        for number in range(2):
            await asyncio.gather(
                *(
                    engine.complete(
                        Request(PREFIX, LONG, noise_key=(0, "train", 1, f"t{number}", str(n)))
                    )
                    for n in range(3)
                )
            )
        return sorted(one.num_requests for one in servers)

    with fakes(MODEL, 2) as servers:
        found = run(servers, tmp_path, work)
    assert sum(found) == 6 and found[0] in (0, 3)


def test_errors_of_a_server_are_tried_again_and_then_told(tmp_path: Path) -> None:
    async def work(engine: VllmEngine) -> Completion:
        servers[0].fail_next = 2
        found = await ask(engine, 0)
        servers[0].fail_next = 1000
        with raises_code("request-failed-often"):
            await ask(engine, 1)
        return found

    with fakes(MODEL) as servers:
        found = run(servers, tmp_path, work)
    assert same([found], native(MODEL, range(1)))


def test_a_server_that_hangs_is_found_and_the_deadline_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treegraft.policy.engine.vllm.fleet.WATCH_S", 0.05)

    async def work(engine: VllmEngine) -> Completion:
        servers[0].hangs = True
        asked = asyncio.create_task(ask(engine, 0))
        while not servers[1].num_requests:
            await asyncio.sleep(0.01)
        found = await asked
        servers[0].hangs = servers[1].hangs = True
        with raises_code("engine-late"):
            await ask(engine, 1)
        return found

    with fakes(MODEL, 2) as servers:
        found = run(servers, tmp_path, work, hang_timeout_s=0.3, deadline_s=1.0)
        servers[0].hangs = servers[1].hangs = False
    assert same([found], native(MODEL, range(1)))


@pytest.mark.smoke
def test_a_slow_server_is_drained_until_the_next_publish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two takes a second a token: its requests move, and completions are the same."""
    monkeypatch.setattr(fleet, "WATCH_S", 0.05)

    async def work(engine: VllmEngine) -> list[Completion]:
        servers[1].token_s = 1.0
        found = await asyncio.gather(*(ask(engine, one) for one in range(32)))
        metrics = engine.take_metrics()
        assert metrics["time/engine_drained"] == 1.0 and metrics["time/engine_moved"] > 0
        assert engine.capacity == 4 and metrics["time/engine_restarts"] == 0.0
        servers[1].token_s = 0.0
        await engine.publish(ModelWeights(OTHER.state_dict()), 1)
        assert engine.capacity == 8 and servers[1].num_loads == servers[0].num_loads
        return found

    with fakes(MODEL, 2, token_s=0.015) as servers:
        found = run(servers, tmp_path, work)
    assert same(found, native(MODEL, range(32)))


@pytest.mark.parametrize(
    ("speeds", "slow"),
    [
        # A quarter of the others' median, 100 and 10 a request, in all and for each request.
        ([(20.0, 2.0), (100.0, 10.0), (100.0, 10.0)], [0]),
        ([(25.0, 2.5), (100.0, 10.0), (100.0, 10.0)], []),
        # Few requests: slow in all, quick for each.
        ([(20.0, 20.0), (100.0, 10.0), (100.0, 10.0)], []),
        ([(0.0, 0.0), (100.0, 10.0), None], [0]),
        ([(0.0, 0.0), None, None], []),
    ],
)
def test_which_server_is_slow_by_hand(
    speeds: list[tuple[float, float] | None], slow: list[int]
) -> None:
    settings = load_config(tiny()).engine
    many = Fleet([Server(str(n), None) for n in range(3)], settings, {}, False)  # type: ignore[arg-type]
    for _ in range(fleet.SLOW_LOOKS):
        assert not many.num_drained
        for member, speed in zip(many.members, speeds, strict=True):
            member.state, member.speed = fleet.State.LIVE, speed
        many._find_slow()
    found = [n for n, one in enumerate(many.members) if one.state is fleet.State.DRAINED]
    assert found == slow and many.num_drained == len(slow)
    # Where no other is left, a drained one answers.
    for member in many.members:
        if member.state is fleet.State.LIVE:
            member.state = fleet.State.LEFT_OUT
    if slow:
        assert asyncio.run(many._member_for(None)) is many.members[slow[0]]


def test_without_a_server_left_the_engine_has_died(tmp_path: Path) -> None:
    async def work(engine: VllmEngine) -> None:
        await asyncio.to_thread(servers[0].die)
        with raises_code("no-server-left"):
            await ask(engine, 0)
        assert isinstance(engine.death, EngineError)

    with fakes(MODEL) as servers:
        run(servers, tmp_path, work, max_restarts=1, start_timeout_s=1.0)


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    async def work(engine: VllmEngine) -> None:
        await engine.publish(ModelWeights(OTHER.state_dict()), 1)
        assert servers[0].owner.startswith(f"{os.uname().nodename}:{os.getpid()}:")

    # Other processes of the suite may have theirs there.
    ours = f"treegraft-*{os.getpid()}-*"
    before = set(launch.SHARED_MEMORY.glob(ours))
    with fakes(MODEL) as servers:
        run(servers, tmp_path, work)
        assert servers[0].owner == ""
    assert not list(tmp_path.iterdir())
    assert set(launch.SHARED_MEMORY.glob(ours)) <= before


def learner_of(model: Any) -> Learner:
    config = load_config(tiny())
    own = copy.deepcopy(model)
    return Learner(own, config.learn, config.loss, length_constant=7)


@pytest.mark.parametrize("num_servers", [1, 2])
def test_a_server_that_keeps_its_old_weights_is_told_from_the_learner(
    tmp_path: Path, num_servers: int
) -> None:
    """It says that it has the new ones, with their label and checksum. Where another server is
    left, none of its tokens reaches a tree; after three publishes the run ends."""
    learner = learner_of(OTHER)
    expected = native(OTHER, range(6))

    async def work(engine: VllmEngine) -> None:
        publisher = Publisher(engine, learner, "float32", TrainState.fresh())
        await publisher.publish(1)
        assert publisher.check(1, None)["learn/canary_gap"] < 1e-5
        assert engine.capacity == 4 * num_servers
        bad = servers[-1]
        bad.model.load_state_dict(MODEL.state_dict())
        bad.skip_loads = True
        for version in (2, 3):
            await publisher.publish(version)
            assert publisher.check(version, None)["learn/canary_gap"] > 1e-2
            if num_servers > 1:
                assert engine.capacity == 4
                assert same(await asyncio.gather(*(ask(engine, n) for n in range(6))), expected)
        with raises_code("server-drifts"):
            await publisher.publish(4)

    with fakes(MODEL, num_servers) as servers:
        run(servers, tmp_path, work)


def test_a_server_that_is_right_again_is_trusted_again(tmp_path: Path) -> None:
    learner = learner_of(OTHER)

    async def work(engine: VllmEngine) -> None:
        publisher = Publisher(engine, learner, "float32", TrainState.fresh())
        for version in range(1, 6):
            servers[0].skip_loads = version % 3 != 0
            if servers[0].skip_loads:
                servers[0].model.load_state_dict(MODEL.state_dict())
            await publisher.publish(version)
            assert (publisher.check(version, None)["learn/canary_gap"] < 1e-5) == (version % 3 == 0)
        assert engine.take_metrics()["time/engine_drained"] == 4.0

    with fakes(MODEL) as servers:
        run(servers, tmp_path, work)


def test_bfloat16_canaries_are_measured_by_the_first_publish() -> None:
    """Mean differences by hand: |-1 - -1.1| and |-2 - -1.9| are 0.1 in the mean, whose double is
    not exceeded by 0.2 and is by 0.3."""

    class Stub:
        answers: Any = None

        async def canaries(self) -> Any:
            return self.answers

        def set_aside(self, name: str, why: str) -> None:
            aside.append((name, why))

    class Scorer:
        def with_logprobs(self, trees: Any) -> Any:
            row = (-1.0, -2.0)
            return [
                replace(one, steps=(one.root, replace(one.steps[1], old_logprobs=row)))
                for one in trees
            ]

    def completion(*logprobs: float) -> Completion:
        return Completion(
            token_ids=(5, 6),
            sampling_logprobs=logprobs,
            entropies=(0.0, 0.0),
            finish=StopReason.LENGTH,
            policy_version=0,
        )

    aside: list[tuple[str, str]] = []
    engine, scorer = Stub(), Scorer()
    canaries = Canaries("bfloat16", None)

    def check() -> float | None:
        return asyncio.run(canaries.check(engine, scorer))  # type: ignore[arg-type]

    engine.answers = {"s": [completion(-1.1, -1.9)]}
    assert check() == pytest.approx(0.1) and canaries.first_gap == pytest.approx(0.1)
    engine.answers = {"s": [completion(-1.1, -1.9)], "t": [completion(-1.15, -1.9)]}
    assert check() == pytest.approx(0.125) and not aside
    engine.answers = {"s": [completion(-1.3, -2.3)], "t": [completion(-1.0, -2.0)]}
    assert check() == pytest.approx(0.3)
    assert aside == [
        ("s", "s and the learner differ by 0.3 nats a token (limit 0.2) after a publish")
    ]
    engine.answers = {}
    assert check() is None
    # After a resume the measure is that of the run's first publish.
    assert Canaries("bfloat16", 0.1).first_gap == 0.1


# ------------------------------------------------------------------ adapters


def adapted_learner() -> Learner:
    """Of the first model with an adapter that is no longer zero."""
    lora = {"lora": {"rank": 2, "targets": ["q_proj", "v_proj", "down_proj"]}}
    config = load_config(tiny(model=lora))
    model = with_adapters(copy.deepcopy(MODEL), config.model, seed=0)
    learner = Learner(model, config.learn, config.loss, length_constant=7)
    move(learner, 1)
    return learner


def move(learner: Learner, seed: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in learner.model.named_parameters():
            if ".lora_B." in name:
                weight.copy_(0.2 * torch.randn(weight.shape, generator=draws))


def test_adapters_alone_are_published_over_the_first_weights(tmp_path: Path) -> None:
    """Completions are those of the merged weights, also by a server that has died and is back."""
    learner = adapted_learner()
    first = dict(learner.weights())

    async def work(engine: VllmEngine) -> list[list[Completion]]:
        publisher = Publisher(engine, learner, "float32", TrainState.fresh())
        await publisher.publish(1)
        found = [await asyncio.gather(*(ask(engine, one) for one in range(6)))]
        assert publisher.check(1, None)["learn/canary_gap"] < 1e-5
        assert servers[0].num_loads == 1, "the first weights, when it was opened"
        assert servers[0].adapter_files == [
            "README.md",
            "adapter_config.json",
            "adapter_model.safetensors",
        ]
        folders = list(engine._weights.iterdir())
        move(learner, 2)
        await publisher.publish(2)
        assert servers[0].num_loads == 1 and len(servers[0].adapters) == 1
        # The former adapter is removed, the first weights stay.
        assert len(list(engine._weights.iterdir())) == len(folders) == 2
        await asyncio.to_thread(servers[0].die)
        asked = [asyncio.create_task(ask(engine, one)) for one in range(6)]
        await asyncio.sleep(0.1)
        await asyncio.to_thread(servers[0].revive)
        found.append(await asyncio.gather(*asked))
        assert servers[0].num_loads == 2 and servers[0].num_adapter_loads == 3
        return found

    with fakes(MODEL) as servers:
        before, after = run(servers, tmp_path, work, publish="adapter")
    for weights, found in ((first, before), (dict(learner.weights()), after)):
        merged = copy.deepcopy(MODEL)
        merged.load_state_dict(weights)
        assert same(found, native(merged, range(6)))


def test_adapters_need_a_rank(tmp_path: Path) -> None:
    with raises_code(
        "settings-contradict",
        "publish.kind",
        "model.lora.rank",
        match=r"publish\.kind: got 'adapter', but model\.lora\.rank",
    ):
        load_config(tiny(engine={"kind": "vllm"}, publish={"kind": "adapter"}))

    async def work(engine: VllmEngine) -> None:
        with raises_code("adapter-missing", match="these weights come without adapters"):
            await engine.publish(ModelWeights(OTHER.state_dict()), 1)

    with fakes(MODEL) as servers:
        run(servers, tmp_path, work, publish="adapter")
    config = load_config(
        tiny(model={"lora": {"rank": 9}}, engine={"kind": "vllm"}, publish={"kind": "adapter"})
    )
    found = options(config, 1)
    assert found[found.index("--max-lora-rank") + 1] == "16" and "--enable-lora" in found


def test_the_former_adapter_goes_when_the_new_one_is_there() -> None:
    """A failed load leaves it."""
    said: list[tuple[str, str]] = []

    class Stub:
        fails = False

        async def request(self, method: str, path: str, body: dict[str, str], **_: Any) -> None:
            said.append((path.rpartition("/")[2], body["lora_name"]))
            if self.fails:
                raise Unreachable("no room")

    server, held = Stub(), Held(has_base=True)
    for number, label in enumerate("abc"):
        due = Due(label, WeightsFolder("/nowhere"), "", is_adapter=True)
        server.fails = number == 1
        with contextlib.suppress(Unreachable):
            asyncio.run(give_weights(server, held, due, None, 1.0))  # type: ignore[arg-type]
        assert held.adapter == "aac"[number]
    load, unload = "load_lora_adapter", "unload_lora_adapter"
    assert said == [(load, "a"), (load, "b"), (load, "c"), (unload, "a")]


# ------------------------------------------------------------------ weights from memory to memory


def test_weights_go_from_memory_to_memory(tmp_path: Path) -> None:
    """In buckets over gloo, twice through one pipe to each server; nothing is written."""
    third = build_model("llama", 2)

    async def work(engine: VllmEngine) -> list[list[Completion]]:
        found = []
        for version, model in enumerate((OTHER, third), 1):
            await engine.publish(ModelWeights(model.state_dict()), version)
            size = sum(one.nbytes for one in model.state_dict().values())
            # The first publish counts what the servers began with.
            most = (3 if version == 1 else 1.01) * size
            assert size <= engine.take_metrics()["time/publish_bytes"] <= most
            found.append(await asyncio.gather(*(ask(engine, one) for one in range(6))))
        assert not list(engine._weights.iterdir())
        return found

    with fakes(MODEL, 2) as servers:
        before, after = run(servers, tmp_path, work, publish="memory")
        assert [(one.num_joins, one.num_loads) for one in servers] == [(1, 3), (1, 3)]
    assert same(before, native(OTHER, range(6))) and same(after, native(third, range(6)))


def test_the_meeting_place_of_a_publish_listens_on_one_interface() -> None:
    meeting = pipe.Pipe("127.0.0.1", 0, 0, 2, "gloo", 5.0)
    socket.create_connection(("127.0.0.1", meeting.port), 5).close()
    # Also of this machine: whoever listens on all interfaces answers here.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", meeting.port), 5)
    meeting.close()


def test_half_a_publish_never_counts(tmp_path: Path) -> None:
    """A server that loses the network after three tensors is left out, with a label that no request
    takes; the other one answers by the new weights."""

    async def work(engine: VllmEngine) -> list[Completion]:
        servers[0].receives = 3
        await engine.publish(ModelWeights(OTHER.state_dict()), 1)
        found = await asyncio.gather(*(ask(engine, one) for one in range(6)))
        while engine._fleet.members[0].state is not State.LEFT_OUT:
            await asyncio.sleep(0.01)
        assert servers[0].label == "loading" and servers[1].label == engine._fleet.due.label
        return found

    with fakes(MODEL, 2) as servers:
        found = run(servers, tmp_path, work, publish="memory", max_restarts=1)
    assert same(found, native(OTHER, range(6)))


def test_a_server_that_is_back_gets_the_weights_of_memory_again(tmp_path: Path) -> None:
    async def work(engine: VllmEngine) -> list[Completion]:
        await engine.publish(ModelWeights(OTHER.state_dict()), 1)
        await asyncio.to_thread(servers[0].die)
        asked = [asyncio.create_task(ask(engine, one)) for one in range(6)]
        await asyncio.sleep(0.1)
        await asyncio.to_thread(servers[0].revive)
        return await asyncio.gather(*asked)

    with fakes(MODEL) as servers:
        found = run(servers, tmp_path, work, publish="memory")
    assert same(found, native(OTHER, range(6)))


def test_what_several_ranks_stream_is_sent_once_a_publish() -> None:
    """They may be learning when a server is back: it waits for the next publish."""

    class Streamed:
        names, fingerprint = ["w"], "f"

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield "w", torch.zeros(2)

    async def main() -> None:
        senders, server = Senders(1.0), Server("http://127.0.0.1:9", httpx.AsyncClient())
        due = Due("a", None, "f", source=Streamed())
        assert await senders.give({}, due) == {}
        fault: Any = (await senders.give({server: {}}, due))[server]
        assert fault.code == CHANGED

    asyncio.run(main())


def test_buckets_hold_what_was_put_in() -> None:
    """Every type begins where it may, and each bucket but the last two is full."""
    given = [
        ("a", torch.arange(3, dtype=torch.int8)),
        ("b", torch.randn(2, 5).bfloat16().T),
        ("c", torch.tensor(7.5)),
        ("d", torch.randn(4, 4, dtype=torch.float64)),
        ("e", torch.randn(3)),
    ]
    found = [*buckets(given, size=100)]
    assert [[name for name, *_ in one.meta] for one in found] == [[*"abcd"], ["e"], []]
    parts = [one for bucket in found for one in parts_of(*bucket)]
    for (name, tensor), (other, back) in zip(given, parts, strict=True):
        assert name == other and back.dtype == tensor.dtype and torch.equal(back, tensor)


def test_a_handle_of_memory_travels_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """Integers and bytes, by torch's own names; the receiver takes its own number of the GPU."""
    seen: list[Any] = []

    class Storage:
        def _share_cuda_(self) -> tuple[Any, ...]:
            return (3, b"handle\x00\xff", 4096, 512, b"counter", 8, b"event", True)

        @staticmethod
        def _new_shared_cuda(*values: Any) -> None:
            seen.extend(values)
            raise KeyboardInterrupt

    flat = SimpleNamespace(untyped_storage=Storage)
    monkeypatch.setattr(pipe, "_untyped_storage", Storage)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(KeyboardInterrupt):
        pipe.opened(json.loads(json.dumps(pipe.handle_of(flat))))  # type: ignore[arg-type]
    assert seen == [0, b"handle\x00\xff", 4096, 512, b"counter", 8, b"event", True]


# ------------------------------------------------------------------ servers that draw by themselves


@contextlib.contextmanager
def plain_fakes(num: int = 1, **options: Any) -> Iterator[list[FakeVllm]]:
    own = {"logprobs_mode": "processed_logprobs", "draws_here": False}
    with fakes(MODEL, num, **(own | options)) as servers:
        yield servers


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_servers_without_the_plugin_give_entropies_of_the_likely_tokens(
    tmp_path: Path, temperature: float
) -> None:
    """Log-probabilities and sums over the 20 likeliest tokens are those of the model; the same
    key gives the same tokens on another server."""
    sampling = Sampling(max_new_tokens=6, temperature=temperature)

    async def work(engine: VllmEngine) -> tuple[list[Completion], list[Completion], float]:
        first = await asyncio.gather(*(ask(engine, one, sampling) for one in range(8)))
        await engine.canaries()
        bound = engine.take_metrics()["rollout/entropy_tail_bound"]
        assert "rollout/entropy_tail_bound" not in engine.take_metrics()
        await asyncio.to_thread(servers[0].die)
        again = await asyncio.gather(*(ask(engine, one, sampling) for one in range(8)))
        return first, again, bound

    with plain_fakes(2) as servers:
        first, again, bound = run(servers, tmp_path, work, entropies="top_k")
    assert same(first, again)
    missed, bounds = list[float](), list[float]()
    assert (len({one.token_ids for one in first}) > 4) == (temperature > 0)
    for one in first:
        assert one.entropy_kind is EntropyKind.TOP_K
        path = torch.tensor([[*PREFIX, *one.token_ids]])
        logits = MODEL(path).logits[0, len(PREFIX) - 1 : -1] / (temperature or 1.0)
        logprobs = logits.log_softmax(dim=-1)
        own = logprobs.gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]
        likely = logprobs.topk(20).values
        partial = -(likely.exp() * likely).sum(dim=1)
        full = -(logprobs.exp() * logprobs).sum(dim=1)
        assert torch.allclose(torch.tensor(one.sampling_logprobs), own, atol=1e-5)
        assert torch.allclose(torch.tensor(one.entropies), partial, atol=1e-5)
        assert (partial < full - 1e-3).all()
        missed += (full - partial).tolist()
        tail = 1 - likely.exp().sum(dim=1)
        bounds += (tail * ((logprobs.shape[1] - 20) / tail).log()).tolist()
    assert bound == pytest.approx(sum(bounds) / len(bounds), abs=1e-5)
    assert all(one < most for one, most in zip(missed, bounds, strict=True))


def test_measured_entropies_are_exact_where_vllm_draws(tmp_path: Path) -> None:
    """The tokens are those of "top_k", also on a server that dies and is back: it is asked to
    measure anew. Filters are refused, since vLLM's order is another."""

    async def work(engine: VllmEngine) -> list[Completion]:
        first = await asyncio.gather(*(ask(engine, one, LONG) for one in range(4)))
        await asyncio.to_thread(servers[0].die)
        later = asyncio.create_task(ask(engine, 4, LONG))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(servers[0].revive)
        if measures:
            with raises_code("filters-invalid"):
                await ask(engine, 5, Sampling(max_new_tokens=2, filters=Filters(top_k=2)))
            assert "rollout/entropy_tail_bound" not in engine.take_metrics()
        return [*first, await later]

    found = {}
    for measures in (True, False):
        with plain_fakes(runner=2) as servers:
            kind = "measured" if measures else "top_k"
            found[kind] = run(servers, tmp_path, work, entropies=kind)
            assert servers[0].measures is measures
    for one, other in zip(*found.values(), strict=True):
        assert (one.token_ids, one.sampling_logprobs) == (other.token_ids, other.sampling_logprobs)
        assert one.entropy_kind is EntropyKind.EXACT and other.entropy_kind is EntropyKind.TOP_K
        logits = MODEL(torch.tensor([[*PREFIX, *one.token_ids]])).logits[0, len(PREFIX) - 1 : -1]
        logprobs = logits.log_softmax(dim=-1)
        exact = -(logprobs.exp() * logprobs).sum(dim=1)
        assert torch.allclose(torch.tensor(one.entropies), exact, atol=1e-5)
        assert all(a > b for a, b in zip(one.entropies, other.entropies, strict=True))


def test_only_the_v2_runner_measures(tmp_path: Path) -> None:
    async def work(engine: VllmEngine) -> None:
        raise AssertionError("a server was taken that cannot measure")

    with plain_fakes() as servers, raises_code("server-without-draws"):
        run(servers, tmp_path, work, entropies="measured")
    config = load_config(tiny(engine={"kind": "vllm", "vllm": {"entropies": "measured"}}))
    words = " ".join(options(config, tmp_path / "http-0"))
    assert "processed_logprobs" in words and "--logits-processors" not in words
    found = _environment(config.engine.vllm, 0, tmp_path, tmp_path)
    assert found["VLLM_USE_V2_MODEL_RUNNER"] == "1"


def test_the_bound_of_what_is_left_out_by_hand() -> None:
    """Four tokens, of which two are kept: .5 and .3. The other two have .2 together."""
    table = np.log([[0.1, 0.5, 0.3], [0.5, 0.5, 0.3]])
    logprobs, entropies, tails = likely_columns(table)
    assert logprobs == pytest.approx([math.log(0.1), math.log(0.5)])
    assert entropies == pytest.approx(2 * [0.5 * math.log(2) - 0.3 * math.log(0.3)])
    assert tails == pytest.approx([0.2, 0.2])
    (bound, _) = tail_bounds(tails, 4 - 2)
    assert bound == pytest.approx(0.2 * math.log(10))
    for one, other in ((0.1, 0.1), (0.15, 0.05), (0.19, 0.01)):
        left_out = -one * math.log(one) - other * math.log(other)
        assert 0.2 * math.log(5) < left_out <= bound + 1e-12
    # Nothing is left out, also where rounding says less than nothing.
    assert tail_bounds(np.array([0.0, -1e-7, 1e-3]), 0) == pytest.approx(
        [0, 0, 1e-3 * math.log(1e3)]
    )


def test_a_reply_in_columns_lacks_its_tails(tmp_path: Path) -> None:
    """One by a server of an earlier version is refused; exact entropies have none."""
    columns = packed([3], [-1.0], [-1.0])
    assert unpacked(columns) == ([3], [-1.0], [-1.0], None)
    with pytest.raises(KeyError, match="tails"):
        unpacked(columns, 50)
    columns = packed([3], [-1.0], [-1.0], [0.5])
    assert unpacked(columns, 22).bounds == pytest.approx([0.5 * math.log(4)])


def test_a_draw_by_seed_and_position_does_not_see_how_a_path_is_asked_for(tmp_path: Path) -> None:
    """vLLM's V2 runner: with a probe in between, and without, the tokens are the same. The former
    one begins its generator anew with each request, so each has a seed of its own."""

    async def work(engine: VllmEngine) -> list[Completion]:
        request = Request(PREFIX, LONG, noise_key=key(0))
        probed = replace(request, probe_tokens=3, on_probe=lambda _: None)
        return [await engine.complete(one) for one in (request, probed)]

    with plain_fakes(runner=2) as servers:
        first, again = run(servers, tmp_path, work, entropies="top_k")
        assert servers[0].num_requests == 3
    assert same([first], [again])
    with plain_fakes() as servers:
        first, again = run(servers, tmp_path, work, entropies="top_k")
    assert first.token_ids[:3] == again.token_ids[:3] != again.token_ids[3:6]


def test_on_gpus_the_draw_is_left_to_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_config(tiny(engine={"kind": "vllm"}))
    there = {"engine": {"kind": "vllm", "vllm": {"servers": ["http://127.0.0.1:9"]}}}
    assert not draws_by_vllm(recipe.engine.vllm)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert draws_by_vllm(recipe.engine.vllm)
    assert not draws_by_vllm(load_config(tiny(**there)).engine.vllm)
    config = load_config(recipe, ["engine.vllm.entropies=top_k"])
    words = " ".join(options(config, tmp_path / "http-0"))
    assert "--logits-processors" not in words and "--no-async-scheduling" not in words
    found = _environment(config.engine.vllm, 0, tmp_path, tmp_path)
    assert "VLLM_USE_V2_MODEL_RUNNER" not in found


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_servers_without_the_plugin_get_weights_and_canaries(tmp_path: Path, family: str) -> None:
    """A tied head too, of which such servers hold a copy."""
    other = build_model(family, 1)
    learner = learner_of(other)

    async def work(engine: VllmEngine) -> Completion:
        publisher = Publisher(engine, learner, "float32", TrainState.fresh())
        await publisher.publish(1)
        assert publisher.check(1, None)["learn/canary_gap"] < 1e-5
        seen: list[int] = []
        found = await engine.complete(
            Request(
                PREFIX,
                LONG,
                noise_key=key(0),
                probe_tokens=3,
                on_probe=lambda x: seen.append(len(x)),
            )
        )
        assert seen == [3]
        servers[0].model.load_state_dict(MODEL.state_dict())
        servers[0].skip_loads = True
        await publisher.publish(2)
        assert publisher.check(2, None)["learn/canary_gap"] > 1e-2
        return found

    with plain_fakes() as servers:
        found = run(servers, tmp_path, work, entropies="top_k")
    logits = other(torch.tensor([[*PREFIX, *found.token_ids]])).logits[0, len(PREFIX) - 1 : -1]
    own = logits.log_softmax(dim=-1).gather(1, torch.tensor(found.token_ids)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(found.sampling_logprobs), own, atol=1e-5)


@pytest.mark.parametrize(
    ("identity", "code"),
    [
        ({"dtype": "bfloat16"}, "server-other-dtype"),
        ({"max_context": 20}, "server-context-short"),
        ({"max_logprobs": 5}, "server-logprobs-few"),
        ({"logprobs_mode": "raw_logprobs"}, "server-logprobs-mode"),
    ],
)
def test_plain_servers_that_do_not_fit_are_refused(
    tmp_path: Path, identity: dict[str, Any], code: str
) -> None:
    async def work(engine: VllmEngine) -> None:
        raise AssertionError("a server was taken that does not fit")

    with plain_fakes(**identity) as servers, raises_code(code):
        run(servers, tmp_path, work, entropies="top_k")


def test_weights_that_somebody_else_moves(tmp_path: Path) -> None:
    """Nothing is written or loaded, labels of weights mean nothing, and a publish sets the
    version."""

    async def work(engine: VllmEngine) -> list[Completion]:
        found = [await ask(engine, 0)]
        for version, other in enumerate((build_model("llama", 1), MODEL), 1):
            servers[0].model.load_state_dict(other.state_dict())
            servers[0].label = f"of somebody {version}"
            await engine.publish(ModelWeights({}), version)
            found.append(await ask(engine, 0))
        return found

    with plain_fakes() as servers:
        # Nothing of ours runs there.
        servers[0].has_plugin = False
        before, other, again = run(servers, tmp_path, work, entropies="top_k", publish="external")
        assert servers[0].num_loads == 0 and len(set(servers[0].labels_asked)) == 3
    assert [one.policy_version for one in (before, other, again)] == [0, 1, 2]
    assert before.token_ids == again.token_ids != other.token_ids


def test_filters_need_the_plugin(tmp_path: Path) -> None:
    engine = {"kind": "vllm", "vllm": {"entropies": "top_k"}}
    with raises_code("settings-contradict", "eval.top_k", "engine.vllm.entropies"):
        load_config(tiny(engine=engine, eval={"top_k": 5, "num_samples": 1}))
    load_config(tiny(engine={"kind": "vllm"}, eval={"top_k": 5, "num_samples": 1}))


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("identity", "code"),
    [
        ({"vocab_size": 7}, "server-other-model"),
        ({"model_type": "qwen2"}, "server-other-model"),
        ({"dtype": "bfloat16"}, "server-other-dtype"),
        ({"plugin": 0}, "server-plugin-version"),
        ({"draws": [1, 2, 3]}, "server-plugin-version"),
        ({"max_context": 20}, "server-context-short"),
        ({"max_logprobs": 1}, "server-logprobs-few"),
        ({"logprobs_mode": "raw_logprobs"}, "server-logprobs-mode"),
        ({"draws_here": False}, "server-without-draws"),
    ],
)
def test_servers_that_do_not_fit_are_refused(
    tmp_path: Path, identity: dict[str, Any], code: str
) -> None:
    async def work(engine: VllmEngine) -> None:
        raise AssertionError("a server was taken that does not fit")

    with fakes(MODEL, **identity) as servers, raises_code(code):
        run(servers, tmp_path, work)


def test_a_server_without_the_plugin_is_refused_with_its_version(tmp_path: Path) -> None:
    async def work(engine: VllmEngine) -> None:
        raise AssertionError("a server was taken that has no plugin")

    with fakes(MODEL) as servers:
        servers[0].has_plugin = False
        with raises_code("server-without-plugin"):
            run(servers, tmp_path, work)


def test_two_runs_on_one_server_are_refused(tmp_path: Path) -> None:
    async def work(engine: VllmEngine) -> None:
        other = build_engine(config, copy.deepcopy(MODEL), word_tokenizer(), "tiny")
        try:
            with raises_code("server-of-other-run"):
                await other.open()
        finally:
            await other.close()
        # One that has ended without giving it up is no obstacle.
        servers[0].owner = f"{os.uname().nodename}:4194305:ab"
        third = build_engine(config, copy.deepcopy(MODEL), word_tokenizer(), "tiny")
        try:
            await third.open()
        finally:
            await third.close()

    with fakes(MODEL) as servers:
        config = config_of(servers, tmp_path)
        run(servers, tmp_path, work)


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("http://127.0.0.1:9", "server-not-there"),
        ("127.0.0.1:8000", "vllm-address-invalid"),
    ],
)
def test_addresses_without_a_server_are_refused(tmp_path: Path, url: str, code: str) -> None:
    async def work(engine: VllmEngine) -> None:
        raise AssertionError("there is no server")

    with raises_code(code):
        run([], tmp_path, work, servers=[url])


class Page(BaseHTTPRequestHandler):
    """Answers everything with a page, as a proxy or another program does."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>hello</html>")

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


def test_another_program_is_not_taken_for_a_server(tmp_path: Path) -> None:
    async def work(engine: VllmEngine) -> None:
        raise AssertionError("there is no server")

    with HTTPServer(("127.0.0.1", 0), Page) as pages:
        threading.Thread(target=pages.serve_forever, daemon=True).start()
        with raises_code("server-without-plugin"):
            run([], tmp_path, work, servers=[f"http://127.0.0.1:{pages.server_port}"])
        pages.shutdown()


def test_the_socket_that_a_killed_server_has_left_does_not_stop_the_next(tmp_path: Path) -> None:
    place = tmp_path / "http-0"
    bind = "import socket, sys; socket.socket(socket.AF_UNIX).bind(sys.argv[1])"
    own = {"environment": {}, "log": tmp_path / "log", "sockets": [place]}
    process = Process([sys.executable, "-c", bind, str(place)], **own)
    for _ in range(2):
        process.start()
        while (status := process.exit_status) is None:
            time.sleep(0.05)
        process.stop(for_good=False)
        assert status == 0 and place.is_socket(), process.tail()


def test_a_server_whose_log_cannot_be_written_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with raises_code("server-not-started"):
        Process(["true"], environment={}, log=tmp_path / "file" / "log").start()


def test_a_python_without_vllm_is_refused() -> None:
    for python, code in ((sys.executable, "vllm-missing"), ("/no/python", "vllm-python-broken")):
        config = load_config(tiny(engine={"kind": "vllm", "vllm": {"python": python}}))
        with raises_code(code) as caught:
            find_python(config.engine.vllm)
        assert "make vllm-env" in str(caught.value)


def test_servers_of_ours_do_not_join_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_torchrun = {
        *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "RANK", "WORLD_SIZE"),
        *("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"),
        *("ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    }
    for name in (*of_torchrun, "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("RANKING", "kept")
    settings = load_config(tiny()).engine.vllm
    found = _environment(settings, 0, tmp_path, tmp_path)
    assert not of_torchrun & found.keys() and "OMP_NUM_THREADS" not in found
    assert found["RANKING"] == "kept" and found["VLLM_BATCH_INVARIANT"] == "0"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert _environment(settings, 0, tmp_path, tmp_path)["OMP_NUM_THREADS"] == "7"


def test_a_server_has_the_gpus_that_its_options_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: four GPUs seen by torch, which the variable names 4 to 7."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")

    def gpus(**vllm: Any) -> list[str]:
        settings = load_config(tiny(engine={"kind": "vllm", "vllm": vllm})).engine.vllm
        return [gpus_of(settings, one) for one in range(settings.num_servers)]

    share = ["--gpu-memory-utilization=0.4"]
    assert gpus(num_servers=3) == ["4", "5", "6"]
    assert gpus(gpus=["1,2"], server_args=["--tensor-parallel-size", "2"]) == ["1,2"]
    assert gpus(gpus=["1"], num_servers=2, server_args=share) == ["1", "1"]
    with raises_code("server-gpus-idle"):
        gpus(gpus=["1,2"])
    with raises_code("servers-share-gpu"):
        gpus(num_servers=5)


def test_servers_of_ours_are_reached_by_this_user_alone(tmp_path: Path) -> None:
    """They listen at a file in a folder of mode 700, never at a port."""
    words = options(load_config(tiny()), tmp_path / "http-0")
    assert words[words.index("--uds") + 1] == str(tmp_path / "http-0")
    assert not {"--host", "--port"} & {*words}

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.path.encode())

        def log_message(self, *_: object) -> None: ...

        def address_string(self) -> str:
            return ""

    class AtFile(ThreadingUnixStreamServer):
        def get_request(self) -> tuple[Any, Any]:
            return self.socket.accept()[0], ("", 0)

    paths = [tmp_path / f"http-{number}" for number in range(2)]
    servers = [AtFile(str(path), Answer) for path in paths]
    for one in servers:
        threading.Thread(target=one.serve_forever, daemon=True).start()

    async def ask() -> list[str]:
        addresses = [f"http://server-{number}" for number in range(2)]
        http = client(dict(zip(addresses, paths, strict=True)))
        servers[1].shutdown()
        servers[1].server_close()
        paths[1].unlink()
        said = (await Server(addresses[0], http).request("GET", "/health", timeout_s=20)).text
        is_second_there = await Server(addresses[1], http).is_healthy()
        await http.aclose()
        return [said, str(is_second_there)]

    try:
        assert asyncio.run(ask()) == ["/health", "False"]
    finally:
        servers[0].shutdown()
        servers[0].server_close()


# ------------------------------------------------------------------ weights and processes


def test_folders_of_weights_give_back_every_tensor_and_its_checksum(tmp_path: Path) -> None:
    weights = dict(MODEL.state_dict())
    weights["tied"] = weights["model.embed_tokens.weight"]
    folder = write_folder(tmp_path / "weights", ModelWeights(weights))
    read = dict(folder)
    assert read.keys() == weights.keys()
    assert all(torch.equal(read[name], weights[name]) for name in weights)
    assert weights_fingerprint(read) == weights_fingerprint(weights)
    index = json.loads((folder.path / "weights.json").read_text())
    assert index["twins"] == {"model.embed_tokens.weight": ["tied"]}
    assert "tied" not in load_file(folder.path / index["files"][0])


def test_only_folders_that_nobody_holds_are_swept(tmp_path: Path) -> None:
    """Those of a process with a number that means nothing here, as of another container."""
    config = config_of([], tmp_path)
    left = launch.SHARED_MEMORY / f"treegraft-weights-999999999-{os.getpid()}"
    left.mkdir()
    try:
        with held_folder(left):
            _folder_for_weights(config, tmp_path, [], 1).rmdir()
            assert left.exists()
        _folder_for_weights(config, tmp_path, [], 1).rmdir()
        assert not left.exists()
    finally:
        shutil.rmtree(left, ignore_errors=True)


def test_a_full_shared_memory_is_told_and_not_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    async def work(engine: VllmEngine) -> None:
        monkeypatch.setattr("treegraft.policy.engine.vllm.folder.save_file", full)
        with raises_code("weights-not-written"):
            await engine.publish(ModelWeights(OTHER.state_dict()), 1)

    with fakes(MODEL) as servers:
        run(servers, tmp_path, work)
    free = shutil.disk_usage(launch.SHARED_MEMORY).free
    config = config_of([], tmp_path)
    for num_bytes, is_shared in ((free // 4, True), (free, False)):
        folder = _folder_for_weights(config, tmp_path, [], num_bytes)
        assert folder.is_relative_to(launch.SHARED_MEMORY) == is_shared
        folder.rmdir()


SERVER = """
import multiprocessing.shared_memory as m, os, signal, subprocess, sys, time
memory = m.SharedMemory(create=True, size=1000)
child = subprocess.Popen([sys.executable, "-c", "import signal, time;"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"])
print(memory.name, child.pid, os.getpid(), flush=True)
time.sleep(600)
"""
OWNER = """
import subprocess, sys, time
process = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True)
time.sleep(600)
"""


@pytest.mark.parametrize("victim", ["owner", "server"])
def test_nothing_of_a_server_outlives_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    """The run is killed, or the server: its child, which ignores SIGTERM, and its shared memory go
    too; the folders go with the run."""
    script = tmp_path / "launch.py"
    text = Path(launch.__file__).read_text().replace("GRACE_S = 8.0", "GRACE_S = 0.5")
    script.write_text(text)
    folder = tmp_path / "weights"
    folder.mkdir()
    log = (tmp_path / "log").open("w+")
    command = [sys.executable, str(script), json.dumps([str(folder)])]
    command += [sys.executable, "-c", textwrap.dedent(SERVER)]
    owner = subprocess.Popen([sys.executable, "-c", OWNER, *command], stdout=log)
    try:
        while not (words := (tmp_path / "log").read_text().split()):
            time.sleep(0.05)
        name, child, server = words[0], int(words[1]), int(words[2])
        # The launcher has to have seen the shared memory.
        time.sleep(2 * launch.POLL_S)
        os.kill(owner.pid if victim == "owner" else server, signal.SIGKILL)
        end = time.monotonic() + 20.0
        while Path(f"/proc/{child}").exists() or (launch.SHARED_MEMORY / name).exists():
            assert time.monotonic() < end, "a process or its memory is left"
            time.sleep(0.05)
        if victim == "owner":
            while folder.exists():
                assert time.monotonic() < end, "the folder is left"
                time.sleep(0.05)
        assert folder.exists() == (victim == "server")
    finally:
        owner.kill()
        owner.wait()
        log.close()
