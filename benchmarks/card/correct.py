"""What has to be right before anything is timed."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.arms import ROWS, PackedArm, Plan, VarlenPlan, arms, distance, gradients, own_plan
from benchmarks.card.bench import Bench, Work, check
from benchmarks.card.one_rank import one_rank
from benchmarks.workloads import workloads
from treegraft.core.interfaces import Request
from treegraft.core.types import Sampling
from treegraft.policy.engine.native import NativeEngine
from treegraft.policy.engine.sampling import sample_tokens
from treegraft.policy.learn.dense import (
    AttentionShape,
    distance_from_dense,
    exactness,
    probe_tree,
)
from treegraft.policy.learn.flex import (
    PROOF_TOKENS,
    WIDE,
    compiled_flex,
    flex_distance,
    tree_block_mask,
)
from treegraft.policy.learn.learner import Learner
from treegraft.policy.learn.pack import PackedTree, TreeBatch, columns_of, pack_trees
from treegraft.policy.learn.tree_attention import PackedPlan
from treegraft.policy.noise import philox_4x32, philox_gumbels
from treegraft.policy.weights import plain_weights
from treegraft.settings.policy import EngineSettings, LearnSettings, LossSettings, NativeSettings

NAME = "qwen2.5-1.5b"
SMALL = "smollm2-135m"
_LAYERS = 4
HEADS: Mapping[str, tuple[int, int, int]] = {
    "SmolLM2-135M": (9, 3, 64),
    "1.5B": (12, 2, 128),
    "7B": (28, 4, 128),
    "4B and 8B": (32, 8, 128),
}
"""Query heads, heads of keys and values, and their width."""


def facts(bench: Bench) -> list[Work]:
    """Returns the works that say what the card does without us, and whether the kernels that the
    timings rest on compute what a dense mask does."""
    return [Work("ceilings", _ceilings, 20.0), Work("attention", _attention, 90.0)]


def correct(bench: Bench) -> list[Work]:
    """Returns the works that say whether the card computes what a CPU does."""
    return [
        Work("noise", _noise, 20.0),
        Work("packed = separate", _packed, 40.0),
        Work("masks", _masks, 20.0),
        Work("keys in batches", _keys, 30.0),
        Work("FSDP2 at world size 1", _one_rank, 40.0),
        Work("FlexAttention at the heads of models", _proofs, 60.0),
    ]


def _ceilings(bench: Bench) -> None:
    """Products and copies, against the data sheet."""
    card = bench.card
    size = bench.pick(8192, 64)
    # Random numbers: a card is faster on zeros.
    a, b = torch.randn(2, size, size, device=bench.device, dtype=torch.bfloat16)
    a @ b
    seconds = bench.timed(lambda: [a @ b for _ in range(10)]) / 10
    limit = card.flops / 1e12 if card else None
    bench.add(f"bfloat16 product, {size}", 2e-12 * size**3 / seconds, "TFLOP/s", bound=limit)
    count = bench.pick(1 << 29, 1 << 10)
    data = torch.randint(-9, 9, (count,), dtype=torch.int32, device=bench.device)
    other = torch.empty_like(data)
    other.copy_(data)
    seconds = bench.timed(lambda: [other.copy_(data) for _ in range(5)]) / 5
    limit = card.bandwidth / 1e9 if card else None
    bench.add("copy, read and written", 2e-9 * data.nbytes / seconds, "GB/s", bound=limit)


def _attention(bench: Bench) -> None:
    """Each way of attention that is timed, output and gradients, on one small tree."""
    tree = probe_tree(bench.pick(2049, 129))
    heads = bench.pick({"1.5B": (12, 2, 128), "4B": (32, 8, 128)}, {"tiny": (4, 2, 16)})
    ids = torch.zeros(tree.end, dtype=torch.long, device=bench.device)
    columns: dict[str, Any] = dict.fromkeys(columns_of(TreeBatch), ids)
    batch = TreeBatch(**columns, trees=(tree,), paths=())
    plans: dict[str, Callable[[TreeBatch], Plan]] = {"gathered keys": VarlenPlan}
    if bench.device.type == "cuda":
        plans |= {"packed": own_plan(WIDE), "packed, torch's tiles": own_plan(None)}
    for name, shape in heads.items():
        for way, plan_of in plans.items():
            what = f"{way}, heads of {name}: farthest from a dense mask"
            if not bench.has_time(what):
                return
            with bench.measure(what, "of its norm"):
                begun = bench.seconds
                gap = _distance(plan_of(batch), AttentionShape(*shape), tree, bench.device)
                seconds = {"seconds_with_compiling": bench.seconds - begun}
                check(bench, what, gap, exactness(torch.bfloat16), "of its norm", details=seconds)


def _distance(plan: Plan, shape: AttentionShape, tree: PackedTree, device: torch.device) -> float:
    padding = plan.inputs[0].numel() - tree.end

    def attend(*inputs: Tensor) -> Tensor:
        query, key, value = (functional.pad(one, (0, 0, 0, padding)) for one in inputs)
        return plan.attend(0, query, key, value, shape.options)[: tree.end].transpose(0, 1)

    return distance_from_dense(attend, shape, torch.bfloat16, device, tree)


def _masks(bench: Bench) -> None:
    """Masks from intervals against those from every pair."""
    load = workloads(bench.pick(0.4, 1 / 32))["D"]
    size = load.unique.tokens
    batch = pack_trees(load.trees(bench.tokens(NAME, 0, 1 << 13)))
    plan = PackedPlan(batch, flex=flex_attention)
    nodes = plan._nodes
    total = plan.inputs[0].numel()
    for window in (None, size // 16):
        seconds = bench.timed(lambda w=window: tree_block_mask(nodes, w, bench.device))  # type: ignore[misc]
        ours = tree_block_mask(nodes, window, bench.device)
        theirs = create_block_mask(ours.mask_mod, None, None, total, total, device=bench.device)
        columns = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
        wrong = sum(not torch.equal(getattr(ours, c), getattr(theirs, c)) for c in columns)
        what = f"mask of {total} tokens, window {window}: columns unlike create_block_mask's"
        check(bench, what, float(wrong), 0.0, "columns", f"made in {seconds * 1e3:.1f} ms")


def _proofs(bench: Bench) -> None:
    """FlexAttention against a dense mask, as a learner tries it when it is made. Last, since each
    shape is compiled for several seconds."""
    if bench.device.type == "cpu":
        # FlexAttention has no backward pass there.
        return
    flex = compiled_flex()
    for name, heads in HEADS.items():
        for dtype in (torch.bfloat16, torch.float32):
            what = f"flex against dense, heads of {name}, {str(dtype).partition('.')[2]}"
            if not bench.has_time(what):
                return
            with bench.measure(what, "of its norm"):
                gap = flex_distance(flex, AttentionShape(*heads), dtype, bench.device, PROOF_TOKENS)
                check(bench, what, gap, exactness(dtype), "of its norm")


def _packed(bench: Bench) -> None:
    """Law 1 in float32: the gradient of packed trees is that of one row a trajectory, as the
    learner chooses its attention and by gathered keys."""
    model = bench.model(SMALL, torch.float32)
    trees = workloads(bench.pick(1 / 8, 1 / 64))["D"].trees(bench.tokens(SMALL, 1, 1 << 13))
    expected = gradients(model, arms(model, trees, 1 << 12)[ROWS]())
    ways = {"as the learner chooses": PackedPlan, "gathered keys": _gathered_plan}
    for name, plan_of in ways.items():
        with bench.measure(f"packed = separate, {name}", ""):
            off = distance(gradients(model, PackedArm(model, trees, 1 << 12, plan_of)), expected)
            check(bench, f"packed = separate, {name}: gradient", off, 1e-4, "of its norm")


def _gathered_plan(batch: TreeBatch) -> PackedPlan:
    plan = PackedPlan(batch)
    plan._kernels = lambda *_: None  # type: ignore[method-assign]
    plan._flex = lambda *_: None  # type: ignore[method-assign]
    return plan


def _keys(bench: Bench) -> None:
    """The same keys in batches of 1, 7 and 256 give the same tokens."""
    model = bench.model(NAME, torch.float32, num_hidden_layers=bench.pick(_LAYERS, 2))
    settings = EngineSettings(max_rows=256, native=NativeSettings(cache_gb=bench.pick(4.0, 0.1)))
    count, length = bench.pick((256, 32), (9, 4))
    prompt = bench.tokens(NAME, 2, bench.pick(500, 20))
    engine = NativeEngine(model, bench.tokenizer(NAME), settings)
    sampling = Sampling(max_new_tokens=length)

    async def together(names: Sequence[int]) -> list[tuple[int, ...]]:
        asked = (engine.complete(Request(prompt, sampling, noise_key=(0, "gpu", n))) for n in names)
        return [one.token_ids for one in await asyncio.gather(*asked)]

    async def compare() -> None:
        whole = await together(range(count))
        for size in (1, 7):
            names = range(min(count, 3 * size))
            parts = [await together(names[n : n + size]) for n in range(0, len(names), size)]
            found = [tokens for part in parts for tokens in part]
            wrong = sum(a != b for a, b in zip(found, whole, strict=False))
            what = f"keys in batches of {size} and {count}, float32: completions that differ"
            check(bench, what, float(wrong), 0.0, f"of {len(names)}")
        await engine.close()

    asyncio.run(compare())


def _noise(bench: Bench) -> None:
    """The noise of the CPU and of the device, and what is drawn with both."""
    count = bench.pick(1 << 18, 1 << 10)
    draw = torch.Generator().manual_seed(0)
    words = torch.randint(0, 1 << 32, (6, count), generator=draw)
    found = philox_4x32(words[:4].to(bench.device), words[4:].to(bench.device)).cpu()
    wrong = (found != philox_4x32(words[:4], words[4:])).sum()
    check(bench, "noise: words unlike the CPU's", float(wrong), 0.0, f"of {4 * count}")
    draws = torch.cat((words[4:].t(), torch.arange(count)[:, None]), dim=1)[: count >> 4]
    far = ulps(philox_gumbels(draws.to(bench.device), 64).cpu(), philox_gumbels(draws, 64))
    check(bench, "noise: farthest from the CPU's", far, 1.0, "units of the last place")
    rows, repeats = bench.pick((1 << 12, 256), (1 << 8, 2))
    logits = 3 * torch.randn(rows, 1000, generator=draw)
    on_device = logits.to(bench.device)
    num_different = 0
    for position in range(repeats):
        asked = ([1.0] * rows, [("gpu", n) for n in range(rows)], [position] * rows)
        ours, theirs = (sample_tokens(one, *asked)[0].cpu() for one in (on_device, logits))
        num_different += int((ours != theirs).sum())
    what = "noise: drawn tokens unlike the CPU's"
    # Two entries whose sums differ by rounding alone may change places.
    check(bench, what, float(num_different), 10.0, f"of {rows * repeats}")


def ulps(ours: Tensor, theirs: Tensor) -> float:
    """Returns the largest distance between float32 numbers, in units of the last place."""

    def order(values: Tensor) -> Tensor:
        bits = values.view(torch.int32).long()
        return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)

    return float((order(ours) - order(theirs)).abs().max())


def _one_rank(bench: Bench) -> None:
    """FSDP2 at world size 1 against the plain learner: three updates in float32."""
    learn = LearnSettings(lr=1e-4, max_pack_tokens=bench.pick(8192, 512))
    make = functools.partial(
        bench.model, NAME, torch.float32, num_hidden_layers=bench.pick(_LAYERS, 2)
    )
    trees = workloads(bench.pick(1 / 4, 1 / 64))["A"].trees(bench.tokens(NAME, 5, 1 << 13))
    plain = Learner(make(), learn, LossSettings(), length_constant=512)
    start = {name: weight.clone() for name, weight in plain_weights(plain.model).items()}
    for _ in range(3):
        plain.learn(trees)
    expected = plain_weights(plain.model)
    moved = distance_of(expected, start)
    what = "FSDP2 at world size 1: weights"
    if not bench.has_time(what):
        return
    with bench.measure(what, "of the way"), one_rank(learn) as maker:
        learner = maker(make())
        for _ in range(3):
            learner.learn(trees)
        off = distance_of(dict(learner.stream()), expected) / moved
        check(bench, what, off, 1e-5, "of the way")


def distance_of(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Returns the Euclidean distance of two sets of weights."""
    squares = [(ours[name] - theirs[name]).double().pow(2).sum() for name in theirs]
    return float(torch.stack(squares).sum().sqrt())
