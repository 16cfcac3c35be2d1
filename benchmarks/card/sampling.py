"""Part 2: tokens a second of the native engine, the slow fallback, against what the card's memory
allows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import torch

from benchmarks.card.bench import Bench
from benchmarks.speed.plans import TreePlan, arpo_tree, grow_plan
from treegraft.core.interfaces import Request
from treegraft.core.types import Sampling
from treegraft.extras.lab.roofline import decode_bound
from treegraft.policy.engine.native import NativeEngine
from treegraft.settings.policy import EngineSettings, NativeSettings

NAME = "qwen2.5-1.5b"
_STEPS = 64


def run(bench: Bench) -> None:
    """Adds the rows."""
    sizes = bench.pick([(256, 2048), (64, 2048), (256, 512), (64, 512), (256, 4096)], [(4, 24)])
    with bench.measure(NAME, "tokens/s"):
        _measure(bench, sizes)


def _measure(bench: Bench, sizes: Sequence[tuple[int, int]]) -> None:
    model, shape = bench.model(NAME), bench.shape(NAME)
    rows, tokens = max(n for n, _ in sizes), max(n for _, n in sizes)
    room = torch.cuda.mem_get_info()[0] * 0.7 if bench.device.type == "cuda" else 1e8
    settings = EngineSettings(
        max_rows=rows, native=NativeSettings(cache_gb=room / 1e9, max_prefill_tokens=2048)
    )
    _generate(bench, model)
    engine = NativeEngine(model, bench.tokenizer(NAME), settings)
    try:
        for count, length in sizes:
            what = f"{NAME}, {count} rows x {length} tokens"
            if not bench.has_time(what):
                return
            seconds = asyncio.run(_decode(bench, engine, count, length))
            step = seconds / bench.pick(_STEPS, 4)
            card = bench.card
            best = card and decode_bound(shape, count, length, 2, card.bandwidth)
            note = f"{step * 1e3:.2f} ms a step"
            note += f", {count / step / best:.0%} of the bound" if best else ""
            bench.add(what, count / step, "tokens/s", bound=best, note=note)
        what = f"{NAME}, an ARPO tree of 16 leaves against its leaves apart"
        if bench.has_time(what):
            _tree(bench, engine, what, min(tokens, 2048))
    finally:
        asyncio.run(engine.close())


async def _decode(bench: Bench, engine: NativeEngine, rows: int, length: int) -> float:
    """Seconds of the decoding steps alone: two runs over the same prompts, whose keys and values
    the engine keeps, one of them longer by the steps."""
    prompts = [bench.tokens(NAME, 1000 * length + n, length) for n in range(rows)]

    async def sample(count: int, purpose: str) -> float:
        begun = time.perf_counter()
        sampling = Sampling(max_new_tokens=count)
        await asyncio.gather(
            *(
                engine.complete(Request(prompt, sampling, noise_key=(0, purpose, n)))
                for n, prompt in enumerate(prompts)
            )
        )
        return time.perf_counter() - begun

    steps = bench.pick(_STEPS, 4)
    await sample(4, "first")
    short, whole = await sample(4, "short"), await sample(4 + steps, "long")
    return max(whole - short, 1e-9)


def _tree(bench: Bench, engine: NativeEngine, what: str, length: int) -> None:
    """The same completions of a tree, and of its leaves with a prompt of their own each."""
    plan = arpo_tree(
        num_steps=3, tokens=bench.pick((96, 160), (3, 5)), result=(20, 60), wait_s=(0.0, 0.0)
    )

    async def complete(
        prefix: Sequence[int], count: int, key: tuple[int | str, ...]
    ) -> Sequence[int]:
        sampling = Sampling(max_new_tokens=count)
        return (await engine.complete(Request(prefix, sampling, noise_key=key))).token_ids

    async def grow(plan: TreePlan, seed: int) -> float:
        begun = time.perf_counter()
        # One prompt a start where the leaves stand apart: nothing is shared.
        plans = [plan] if seed == 0 else [TreePlan((start,)) for start in plan.apart().starts]
        await asyncio.gather(
            *(
                grow_plan(complete, one, bench.tokens(NAME, 77 + seed + n, length), (seed, n))
                for n, one in enumerate(plans)
            )
        )
        return time.perf_counter() - begun

    together = asyncio.run(grow(plan, 0))
    apart = asyncio.run(grow(plan, 1))
    bench.add(what, apart / together, "times", note=f"{together:.2f} s, {apart:.2f} s apart")


def _generate(bench: Bench, model: torch.nn.Module) -> None:
    """transformers' generate on the same model, before the engine takes it over."""
    rows, length, steps = bench.pick((64, 2048, 32), (4, 24, 4))
    ids = torch.tensor([bench.tokens(NAME, n, length) for n in range(rows)], device=bench.device)

    def sample(count: int) -> None:
        mask = torch.ones_like(ids)
        model.generate(  # type: ignore[operator]
            ids, attention_mask=mask, do_sample=True, max_new_tokens=count, min_new_tokens=count
        )

    sample(2)
    short, whole = bench.timed(lambda: sample(2)), bench.timed(lambda: sample(2 + steps))
    speed = rows * steps / max(whole - short, 1e-9)
    bench.add(f"{NAME}, {rows} rows x {length} tokens, transformers generate", speed, "tokens/s")
