"""Part 4: one whole update of 16 trees by phase: sample, learn, publish, checksum."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import torch

from benchmarks.card.bench import Bench
from benchmarks.card.trees import Workload
from benchmarks.speed.plans import arpo_tree, grow_plan
from treegraft.core.interfaces import Request
from treegraft.core.types import Sampling
from treegraft.policy.engine.native import NativeEngine
from treegraft.policy.learn.learner import Learner
from treegraft.policy.weights import weights_fingerprint
from treegraft.settings.policy import EngineSettings, LearnSettings, LossSettings, NativeSettings

NAME, LARGE = "qwen2.5-1.5b", "qwen2.5-7b"


def run(bench: Bench) -> None:
    """Adds the rows."""
    with bench.measure("whole update", "s"):
        _update(bench)
    if bench.has_time("checksum at 7B"):
        with bench.measure("checksum at 7B", "s"):
            _checksum(bench)


def _update(bench: Bench) -> None:
    learner = Learner(
        bench.model(NAME),
        LearnSettings(lr=1e-6, max_pack_tokens=32768),
        LossSettings(),
        length_constant=512,
    )
    room = torch.cuda.mem_get_info()[0] * 0.4 if bench.device.type == "cuda" else 1e8
    settings = EngineSettings(max_rows=256, native=NativeSettings(cache_gb=room / 1e9))
    engine = NativeEngine(bench.model(NAME), bench.tokenizer(NAME), settings)
    num_trees, length = bench.pick((16, 512), (2, 16))
    sampled = 0

    async def complete(
        prefix: Sequence[int], count: int, key: tuple[int | str, ...]
    ) -> Sequence[int]:
        sampling = Sampling(max_new_tokens=count)
        return (await engine.complete(Request(prefix, sampling, noise_key=key))).token_ids

    async def sample() -> float:
        nonlocal sampled
        begun = time.perf_counter()
        tokens = bench.pick((200, 400), (3, 5))
        plans = [
            arpo_tree(tokens=tokens, result=(50, 150), wait_s=(0.0, 0.0), seed=n)
            for n in range(num_trees)
        ]
        counts = await asyncio.gather(
            *(
                grow_plan(complete, plan, bench.tokens(NAME, n, length), (0, n))
                for n, plan in enumerate(plans)
            )
        )
        sampled = sum(counts)
        return time.perf_counter() - begun

    async def publish() -> None:
        await engine.publish(learner.weights(), 1)

    try:
        seconds = {"sample": asyncio.run(sample())}
        size = bench.pick(12_000, 64)
        trees = [
            tree
            for n in range(num_trees)
            for tree in Workload.of(size, 1.6, 16).trees(bench.tokens(NAME, n, 8192))
        ]
        seconds["learn"] = bench.timed(lambda: learner.learn(trees))
        seconds["publish, checksums included"] = bench.timed(lambda: asyncio.run(publish()))
        for phase, value in seconds.items():
            share = value / sum(seconds.values())
            bench.add(f"1.5B, {num_trees} trees: {phase}", value, "s", note=f"{share:.0%}")
        note = f"{sampled} sampled tokens, {size * num_trees} unique tokens learned"
        bench.add(f"1.5B, {num_trees} trees: update", sum(seconds.values()), "s", note=note)
    finally:
        asyncio.run(engine.close())


def _checksum(bench: Bench) -> None:
    weights = bench.model(LARGE).state_dict()
    weights_fingerprint(weights)
    seconds = bench.timed(lambda: weights_fingerprint(weights))
    bench.add("checksum at 7B", seconds, "s", bound=1.0, note="goal: under 1 s")
