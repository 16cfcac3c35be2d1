"""Sampling without a server: the native engine beside what transformers has."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.card.bench import Bench, Work
from treegraft.core.interfaces import Request
from treegraft.core.types import Sampling
from treegraft.policy.engine.native import NativeEngine
from treegraft.settings.policy import EngineSettings, NativeSettings

NAME = "qwen2.5-1.5b"
Prompts = Sequence[Sequence[int]]


def sampling(bench: Bench) -> list[Work]:
    """Returns the works: each way with many and with few rows."""
    ways = {
        "native engine": _native,
        "transformers generate": _generate,
        "transformers generate_batch": _continuous,
    }
    return [
        Work(
            f"{num_rows} rows: {name}",
            functools.partial(_measured, way=way, name=name, num_rows=num_rows),
            40.0,
        )
        for num_rows in bench.pick((256, 32), (3,))
        for name, way in ways.items()
    ]


def _measured(bench: Bench, way: Any, name: str, num_rows: int) -> None:
    length, count = bench.pick((512, 128), (12, 5))
    prompts = [bench.tokens(NAME, row, length) for row in range(num_rows)]
    what = f"1.5B, {num_rows} rows of {length} + {count}: {name}"
    seconds, sampled, note = way(bench, prompts, count)
    details = {"seconds": seconds, "ms_a_step": 1e3 * seconds / count}
    bench.add(what, sampled / seconds, "sampled tokens/s", note=note, details=details)


def _native(bench: Bench, prompts: Prompts, count: int) -> tuple[float, int, str]:
    pool = NativeSettings(cache_gb=bench.pick(16.0, 0.1))
    settings = EngineSettings(max_rows=256, native=pool)
    engine = NativeEngine(bench.model(NAME), bench.tokenizer(NAME), settings)

    async def draw(some: Prompts, number: int, limit: int) -> int:
        sampling = Sampling(max_new_tokens=limit)
        asked = (
            engine.complete(Request(prompt, sampling, noise_key=(number, row)))
            for row, prompt in enumerate(some)
        )
        return sum(len(one.token_ids) for one in await asyncio.gather(*asked))

    async def measured() -> tuple[float, int, str]:
        # The first call prepares the kernels, with other prompts: none of ours shall be cached.
        length = len(prompts[0])
        others = [bench.tokens(NAME, 1000 + row, length) for row in range(len(prompts))]
        await draw(others, 0, 4)
        begun = time.perf_counter()
        num = await draw(prompts, 1, count)
        seconds = time.perf_counter() - begun
        await engine.close()
        return seconds, num, "prompts taken in"

    return asyncio.run(measured())


def _generate(bench: Bench, prompts: Prompts, count: int) -> tuple[float, int, str]:
    model = bench.model(NAME)
    ids = torch.tensor(prompts, device=bench.device)
    options: dict[str, Any] = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0}
    options["attention_mask"] = torch.ones_like(ids)
    with torch.inference_mode():
        model.generate(ids, max_new_tokens=4, **options)
        seconds = bench.timed(lambda: model.generate(ids, max_new_tokens=count, **options))
    return seconds, len(prompts) * count, "prompts taken in"


def _continuous(bench: Bench, prompts: Prompts, count: int) -> tuple[float, int, str]:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = bench.model(NAME)
    # By itself it takes nine tenths of the memory, on a CPU too.
    if bench.is_tiny:
        room = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    else:
        room = ContinuousBatchingConfig(max_memory_percent=0.6)
    config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=count,
        eos_token_id=-1,
        pad_token_id=0,
    )

    def generate(some: Prompts) -> int:
        found = model.generate_batch(
            [list(prompt) for prompt in some],
            generation_config=config,
            continuous_batching_config=room,
            progress_bar=False,
        )
        return sum(len(one.generated_tokens) for one in found.values())

    generate(prompts[:2])
    sampled = 0

    def measured() -> None:
        nonlocal sampled
        sampled = generate(prompts)

    seconds = bench.timed(measured)
    attention = model.config._attn_implementation
    return seconds, sampled, f"start and graphs included; attention {attention}"
