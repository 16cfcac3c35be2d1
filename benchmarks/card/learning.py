"""Part 2: forward, backward and optimiser step on packed trees, against the same trajectories
apart."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.card.bench import Bench, Work
from benchmarks.card.one_rank import CannotShard, one_rank
from benchmarks.card.trees import Workload
from treegraft.extras.lab.roofline import model_flops_utilisation
from treegraft.policy.learn.dense import AttentionShape, probe_tree
from treegraft.policy.learn.flex import WIDE, compiled_flex, tree_block_mask
from treegraft.policy.learn.learner import Learner
from treegraft.policy.load import with_adapters
from treegraft.settings.policy import LearnSettings, LoraSettings, LossSettings, ModelSettings

CASES: Mapping[str, tuple[str, int]] = {
    "1.5B full": ("qwen2.5-1.5b", 0),
    "4B full": ("qwen3-4b", 0),
    "7B LoRA": ("qwen2.5-7b", 16),
    "8B LoRA": ("qwen3-8b", 16),
}
"""Shape, and rank of its adapters (0: all weights)."""
OFFLOADED: Mapping[str, str] = {"7B full": "qwen2.5-7b", "8B full": "qwen3-8b"}
"""Shapes whose float32 shards, gradients and moments lie in the host's memory."""
BYTES_EACH = 16
"""Of a weight there: itself, its gradient and two moments in float32."""
RATIOS = (1.3, 1.6, 3.3)
_NUM_RUNS = 2


def works(bench: Bench) -> list[Work]:
    """Returns the works of this part, the large ones last: each shape, then the same offloaded."""
    cases = bench.pick(CASES, {"tiny": CASES["1.5B full"]})
    offloaded = bench.pick(OFFLOADED, {"tiny full": "qwen2.5-1.5b"})
    tiles = [] if bench.is_tiny else [Work("tiles of the backward program", _tiles)]
    return [
        *tiles,
        *(Work(case, functools.partial(_case, case=case, of=of)) for case, of in cases.items()),
        *(
            Work(f"{case}, offloaded", functools.partial(_offloaded, case=case, name=name))
            for case, name in offloaded.items()
        ),
    ]


def _tiles(bench: Bench) -> None:
    """Attention alone, forward and backward, by torch's own tiles and by those that spill less: one
    layer of 7B over a tree of 16k tokens."""
    shape, size = AttentionShape(28, 4, 128), 16_384
    nodes = probe_tree(size).nodes
    mask = tree_block_mask(nodes, None, bench.device)
    flex = compiled_flex()
    inputs = [
        torch.randn(
            1, heads, size, 128, device=bench.device, dtype=torch.bfloat16, requires_grad=True
        )
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    ]

    def both(options: dict[str, int] | None) -> None:
        output = flex(*inputs, block_mask=mask, enable_gqa=True, kernel_options=options)
        torch.autograd.grad(output, inputs, output)

    small = WIDE | {"bwd_BLOCK_M1": 16, "bwd_BLOCK_N2": 16}
    tiles = {"torch's own": None, "those of policy/learn/flex.py": WIDE, "16 x 128": small}
    for name, options in tiles.items():
        what = f"attention of 7B, 16k, forward and backward, tiles: {name}"
        with bench.measure(what, "ms"):
            both(options)  # compiles
            seconds = min(bench.timed(lambda o=options: both(o)) for _ in range(5))  # type: ignore[misc]
            bench.add(what, 1e3 * seconds, "ms", note="the faster ones belong into flex.py")


def _case(bench: Bench, case: str, of: tuple[str, int]) -> None:
    name, rank = of
    learner = _learner(bench, name, rank)
    for size in bench.pick((8192, 32768, 65536), (256,)):
        for ratio in RATIOS:
            what = f"{case}, pack of {size}, share ratio {ratio}"
            if not bench.has_time(what):
                return
            with bench.measure(what, "unique tokens/s"):
                _pack(bench, learner, name, what, Workload.of(size, ratio), size)


def _offloaded(bench: Bench, case: str, name: str) -> None:
    """Full training by one rank whose shards lie in the host's memory."""
    needed, free = BYTES_EACH * bench.shape(name).num_weights, host_bytes()
    if needed > 0.95 * free:
        note = f"left out: {needed / 1e9:.0f} GB of host memory needed, {free / 1e9:.0f} GB free"
        bench.add(f"{case}, offloaded", None, "unique tokens/s", note=note)
        return
    learn = LearnSettings(lr=1e-6, max_pack_tokens=1 << 17)
    try:
        with (
            bench.measure(f"{case}, offloaded", "unique tokens/s"),
            one_rank(learn, offload=True, dtype="bfloat16") as make,
        ):
            learner = make(bench.model(name))
            for size in bench.pick((8192, 32768), (256,)):
                what = f"{case}, offloaded, pack of {size}, share ratio 1.6"
                if not bench.has_time(what):
                    return
                with bench.measure(what, "unique tokens/s"):
                    _learned(bench, learner, name, what, Workload.of(size, 1.6), num_runs=1)
    except CannotShard as reason:
        bench.add(f"{case}, offloaded", None, "unique tokens/s", note=f"not run: {reason}")


def host_bytes() -> int:
    """Returns the memory of this machine that is free, in bytes."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _learner(bench: Bench, name: str, rank: int) -> Learner:
    settings = ModelSettings(
        dtype="bfloat16", gradient_checkpointing=True, lora=LoraSettings(rank=rank)
    )
    model: Any = with_adapters(bench.model(name), settings, seed=0)
    learn = LearnSettings(lr=1e-6, max_pack_tokens=1 << 17, num_minibatches=1, num_epochs=1)
    return Learner(model, learn, LossSettings(), length_constant=512)


def _pack(bench: Bench, learner: Learner, name: str, what: str, load: Workload, size: int) -> None:
    seconds = _learned(bench, learner, name, what, load)
    shape = load.shape
    if (shape.ratio < 2.0 and size > 8192) or not bench.has_time(f"{what}: rows"):
        return
    apart = load.apart(bench.tokens(name, 5, 16384))
    # In packs of the tree's size: rows of one length, so that padded ones take the same.
    learner.settings = learner.settings.__class__(
        **{**vars(learner.settings), "max_pack_tokens": size}
    )
    learner.learn(apart)
    rows = bench.timed(lambda: learner.learn(apart))
    frac = rows / seconds / shape.ratio
    note = f"{frac:.0%} of the share ratio {shape.ratio:.2f}; goal 85 %"
    bench.add(f"{what}: against rows without padding", rows / seconds, "times", note=note)


def _learned(
    bench: Bench, learner: Learner, name: str, what: str, load: Workload, num_runs: int = _NUM_RUNS
) -> float:
    """Adds the rows of an optimiser step on one tree, and returns its seconds."""
    trees, shape = load.trees(bench.tokens(name, 5, 16384)), load.shape
    begun = bench.timed(lambda: learner.learn(trees))
    bench.add(f"{what}: first step, which compiles", begun, "s")
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = min(bench.timed(lambda: learner.learn(trees)) for _ in range(num_runs))
    peak = torch.cuda.max_memory_allocated() / 1e9 if bench.device.type == "cuda" else None
    used = None
    if bench.card:
        seen = shape.num_pairs[0] / shape.num_unique
        sampled = shape.leaves * shape.tokens / shape.num_unique
        used = model_flops_utilisation(
            bench.shape(name),
            shape.num_unique,
            seconds,
            bench.card.flops,
            num_seen=seen,
            scored_frac=sampled,
        )
    memory = "" if peak is None else f"peak {peak:.1f} GB"
    speed = shape.num_unique / seconds
    bench.add(what, speed, "unique tokens/s", note=memory)
    if used is not None:
        goal = "; goal 0.4 at 4B" if "4B" in what else ""
        bench.add(f"{what}: MFU on unique tokens", used, "of the peak", bound=1.0, note=goal)
    return seconds
