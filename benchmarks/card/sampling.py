"""Part 2: tokens a second of the native engine against what the card's memory allows."""

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

MODELS = ("qwen2.5-1.5b", "qwen3-4b", "qwen2.5-7b")
_STEPS = 64
_GOAL = "goal: half of the bound at 256 rows and 2k"


def run(bench: Bench) -> None:
    """Adds the rows."""
    sizes = bench.pick([(256, 2048), (64, 2048), (256, 512), (64, 512), (256, 4096)], [(4, 24)])
    for name in bench.pick(MODELS, MODELS[:1]):
        if bench.has_time(name):
            with bench.measure(name, "tokens/s"):
                _model(bench, name, sizes)


def _model(bench: Bench, name: str, sizes: Sequence[tuple[int, int]]) -> None:
    model, shape = bench.model(name), bench.shape(name)
    rows, tokens = max(n for n, _ in sizes), max(n for _, n in sizes)
    room = torch.cuda.mem_get_info()[0] * 0.7 if bench.device.type == "cuda" else 1e8
    settings = EngineSettings(
        max_rows=rows, native=NativeSettings(cache_gb=room / 1e9, max_prefill_tokens=2048)
    )
    if name == MODELS[0]:
        _generate(bench, model, name)
    engine = NativeEngine(model, bench.tokenizer(name), settings)
    try:
        for count, length in sizes:
            what = f"{name}, {count} rows x {length} tokens"
            if not bench.has_time(what):
                return
            seconds, kernels = asyncio.run(_decode(bench, engine, name, count, length))
            step = seconds / bench.pick(_STEPS, 4)
            card = bench.card
            best = card and decode_bound(shape, count, length, 2, card.bandwidth)
            note = f"{step * 1e3:.2f} ms a step"
            note += f", kernels {kernels * 1e3:.2f} ms" if kernels is not None else ""
            note += f", {count / step / best:.0%} of the bound; {_GOAL}" if best else ""
            bench.add(what, count / step, "tokens/s", bound=best, note=note)
        what = f"{name}, an ARPO tree of 16 leaves against its leaves apart"
        if name == MODELS[0] and bench.has_time(what):
            _tree(bench, engine, name, what, min(tokens, 2048))
    finally:
        asyncio.run(engine.close())


async def _decode(
    bench: Bench, engine: NativeEngine, name: str, rows: int, length: int
) -> tuple[float, float | None]:
    """Seconds of the decoding steps alone, and of their kernels a step: two runs over the same
    prompts, whose keys and values the engine keeps, one of them longer by the steps."""
    prompts = [bench.tokens(name, 1000 * length + n, length) for n in range(rows)]

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
    kernels = None
    if bench.device.type == "cuda":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            await sample(12, "profiled")
        # The first token comes out of the prompt's pass, so twelve tokens are eleven steps.
        busy = sum(event.self_device_time_total for event in found.key_averages())
        kernels = busy * 1e-6 / 11
    return max(whole - short, 1e-9), kernels


def _tree(bench: Bench, engine: NativeEngine, name: str, what: str, length: int) -> None:
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
                grow_plan(complete, one, bench.tokens(name, 77 + seed + n, length), (seed, n))
                for n, one in enumerate(plans)
            )
        )
        return time.perf_counter() - begun

    together = asyncio.run(grow(plan, 0))
    apart = asyncio.run(grow(plan, 1))
    bench.add(what, apart / together, "times", note=f"{together:.2f} s, {apart:.2f} s apart")


def _generate(bench: Bench, model: torch.nn.Module, name: str) -> None:
    """transformers' generate on the same model, before the engine takes it over."""
    rows, length, steps = bench.pick((64, 2048, 32), (4, 24, 4))
    ids = torch.tensor([bench.tokens(name, n, length) for n in range(rows)], device=bench.device)

    def sample(count: int) -> None:
        mask = torch.ones_like(ids)
        model.generate(  # type: ignore[operator]
            ids, attention_mask=mask, do_sample=True, max_new_tokens=count, min_new_tokens=count
        )

    sample(2)
    short, whole = bench.timed(lambda: sample(2)), bench.timed(lambda: sample(2 + steps))
    speed = rows * steps / max(whole - short, 1e-9)
    bench.add(f"{name}, {rows} rows x {length} tokens, transformers generate", speed, "tokens/s")
