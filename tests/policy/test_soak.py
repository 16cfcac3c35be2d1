"""The engine under random traffic for half an hour: memory, threads and blocks stay what they
were."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import threading
import time
from pathlib import Path

import pytest
from tests.support.families import build_model, word_tokenizer
from tests.support.trees import VOCABULARY

from treegraft.core.interfaces import Request
from treegraft.core.types import Sampling
from treegraft.policy.engine.native import NativeEngine
from treegraft.policy.weights import ModelWeights
from treegraft.settings.policy import EngineSettings

SECONDS = float(os.environ.get("TREEGRAFT_SOAK_S", "1800"))
"""How long; shorter to see that it runs."""
GROWTH_MB = 32.0


def resident_mb() -> float:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def tree(engine: NativeEngine, draw: random.Random, number: int) -> None:
    """A prompt and a few generations of branches, of which some are given up; then it is forgotten,
    or left to age."""
    start = tuple(draw.randrange(3, VOCABULARY) for _ in range(40))
    paths = [start + tuple(draw.randrange(3, VOCABULARY) for _ in range(draw.randint(1, 120)))]
    for step in range(draw.randint(1, 4)):
        sources = [path for path in paths for _ in range(draw.randint(1, 3))]
        asked = [
            asyncio.create_task(
                engine.complete(
                    Request(
                        path,
                        Sampling(max_new_tokens=draw.randint(1, 40)),
                        noise_key=(number, step, n),
                    )
                )
            )
            for n, path in enumerate(sources)
        ]
        if draw.random() < 0.1 and len(asked) > 1:
            asked[0].cancel()
        done = await asyncio.gather(*asked, return_exceptions=True)
        whole = [
            (path, d)
            for path, d in zip(sources, done, strict=True)
            if not isinstance(d, BaseException)
        ]
        assert len(whole) >= max(1, len(asked) - 1)
        result = tuple(draw.randrange(3, VOCABULARY) for _ in range(draw.randint(0, 60)))
        paths = [
            (*path, *d.token_ids, *result)[:800]
            for path, d in draw.sample(whole, min(4, len(whole)))
        ]
        await asyncio.sleep(draw.random() * 0.02)
    if draw.random() < 0.7:
        engine.forget(paths[0][:40])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_soak() -> None:
    draw, model = random.Random(0), build_model("qwen3")
    engine = NativeEngine(
        model,
        word_tokenizer(),
        EngineSettings(max_rows=24, native={"cache_gb": 0.01}, deadline_s=60.0),
    )
    marks: list[tuple[float, float, int]] = []

    async def traffic() -> None:
        end, number, version = time.monotonic() + SECONDS, 0, 0
        running: set[asyncio.Task[None]] = set()
        while time.monotonic() < end:
            while len(running) < 8:
                number += 1
                running.add(asyncio.create_task(tree(engine, draw, number)))
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if number % 200 == 0 and version < number // 200:
                version = number // 200
                await engine.publish(ModelWeights(model.state_dict()), version)
            if number % 50 == 0:
                marks.append(
                    (time.monotonic() - end + SECONDS, resident_mb(), threading.active_count())
                )
        await asyncio.gather(*running)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(
                engine.complete(Request((5, 6), Sampling(max_new_tokens=1), noise_key=("last",))),
                30.0,
            )

    async def main() -> None:
        try:
            await traffic()
        finally:
            await engine.close()

    asyncio.run(main())
    # The first fifth fills caches and pools.
    settled = [mark for mark in marks if mark[0] > SECONDS / 5]
    print(
        f"{len(marks)} marks, {settled[0][1]:.0f} MB at {settled[0][0]:.0f} s, {settled[-1][1]:.0f}"
        f" MB at {settled[-1][0]:.0f} s"
    )
    assert max(mark[1] for mark in settled) - settled[0][1] < GROWTH_MB
    assert {mark[2] for mark in settled} == {settled[0][2]}
    cache = engine._cache
    assert not cache.rows and cache.pool.num_blocks <= cache.pool.max_blocks
