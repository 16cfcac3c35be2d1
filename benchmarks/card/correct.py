"""Part 1: what has to be right before anything is timed."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.card.bench import Bench, Work, check
from benchmarks.card.one_rank import CannotShard, one_rank
from benchmarks.card.trees import Workload
from treegraft.core.interfaces import Request
from treegraft.core.types import Sampling
from treegraft.policy.attention_hook import tree_attention
from treegraft.policy.engine.native import NativeEngine
from treegraft.policy.engine.sampling import sample_tokens
from treegraft.policy.learn import scores
from treegraft.policy.learn.dense import AttentionShape, exactness
from treegraft.policy.learn.flex import PROOF_TOKENS, compiled_flex, flex_distance, tree_block_mask
from treegraft.policy.learn.learner import Learner
from treegraft.policy.learn.pack import TreeBatch, pack_trees
from treegraft.policy.learn.tree_attention import PackedPlan
from treegraft.policy.noise import philox_4x32, philox_gumbels
from treegraft.policy.output_head import OutputHead
from treegraft.policy.weights import plain_weights
from treegraft.settings.policy import EngineSettings, LearnSettings, LossSettings, NativeSettings

NAME = "qwen2.5-1.5b"
_LAYERS = 4


def works(bench: Bench) -> list[Work]:
    """Returns the works of this part."""
    common = [
        Work("noise", _noise),
        Work("masks", _masks),
        Work("packed = separate", _packed),
        Work("keys in batches", _keys),
        Work("FSDP2 at world size 1", _one_rank),
    ]
    if bench.device.type == "cpu":
        # FlexAttention has no backward pass there.
        return common
    return [
        Work("the card by itself", _card, 60.0),
        Work("flex against dense", _proofs),
        *common,
        Work("tests marked gpu", _tests),
    ]


def _card(bench: Bench) -> None:
    """What this card does without us."""
    data = torch.empty(2**30, dtype=torch.int32, device=bench.device)
    other = torch.empty_like(data)
    other.copy_(data)
    seconds = bench.timed(lambda: [other.copy_(data) for _ in range(5)]) / 5
    card = bench.card
    limit = card.bandwidth / 1e9 if card else None
    bench.add("copy, read and written", 2 * data.nbytes / seconds / 1e9, "GB/s", bound=limit)
    a, b = torch.randn(2, 8192, 8192, device=bench.device, dtype=torch.bfloat16)
    a @ b
    seconds = bench.timed(lambda: [a @ b for _ in range(10)]) / 10
    limit = card.flops / 1e12 if card else None
    bench.add("bfloat16 product, 8192", 2 * 8192**3 / seconds / 1e12, "TFLOP/s", bound=limit)


def _tests(bench: Bench) -> None:
    """The tests that need a GPU, where what they import is there."""
    needed = ("pytest", "hypothesis", "pydantic_core")
    if lacking := [name for name in needed if importlib.util.find_spec(name) is None]:
        bench.add("tests marked gpu", None, "", note=f"not run: no {', '.join(lacking)} here")
        return
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    except subprocess.TimeoutExpired:
        bench.add("tests marked gpu", None, "", note="FAILED: not over after 150 s")
        return
    last = (done.stdout.strip().splitlines() or [""])[-1]
    passed = re.search(r"(\d+) passed", last)
    note = last if done.returncode == 0 else f"FAILED {last}"
    bench.add("tests marked gpu", float(passed[1]) if passed else None, "passed", note=note)


def _masks(bench: Bench) -> None:
    """Masks from intervals against those from every pair."""
    size = bench.pick(8192, 640)
    batch = pack_trees(Workload.of(size, 2.0).trees(bench.tokens(NAME, 0, 4096)))
    plan = PackedPlan(batch, flex=flex_attention)
    nodes, total = plan._nodes(), plan.inputs[0].numel()
    for window in (None, size // 16):
        seconds = bench.timed(lambda w=window: tree_block_mask(nodes, w, bench.device))  # type: ignore[misc]
        ours = tree_block_mask(nodes, window, bench.device)
        theirs = create_block_mask(ours.mask_mod, None, None, total, total, device=bench.device)
        columns = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
        wrong = sum(not torch.equal(getattr(ours, c), getattr(theirs, c)) for c in columns)
        what = f"mask of {total} tokens, window {window}: columns unlike create_block_mask's"
        check(bench, what, float(wrong), 0.0, "columns", f"made in {seconds * 1e3:.1f} ms")


def _proofs(bench: Bench) -> None:
    """FlexAttention against a dense mask at real heads."""
    flex = compiled_flex()
    shapes = {"1.5B": (12, 2, 128), "7B": (28, 4, 128), "4B and 8B": (32, 8, 128)}
    for name, heads in shapes.items():
        for dtype in (torch.float32, torch.bfloat16):
            what = f"flex against dense, heads of {name}, {str(dtype).partition('.')[2]}"
            if not bench.has_time(what):
                return
            with bench.measure(what, "of its norm"):
                gap = flex_distance(flex, AttentionShape(*heads), dtype, bench.device, PROOF_TOKENS)
                check(bench, what, gap, exactness(dtype), "of its norm")


def _packed(bench: Bench) -> None:
    """Law 1 at real head widths: packed trees against one pass per trajectory, float32."""
    model = bench.model(NAME, torch.float32, num_hidden_layers=bench.pick(_LAYERS, 2))
    size = bench.pick(PROOF_TOKENS, 301)
    text = bench.tokens(NAME, 1, 4096)
    batch = pack_trees(Workload.of(size, 2.0).trees(text), device=bench.device)
    rows = scores.rowwise_hidden(model, batch)
    expected = _logprobs_and_gradient(model, batch, rows)
    ways: dict[str, dict[str, Any]] = {
        "as the learner chooses": {},
        "dense": {"dense_limit": 1 << 20},
    }
    if bench.is_tiny:
        ways["dense"] |= {"compile_kernels": False}
    for name, options in ways.items():
        plan = PackedPlan(batch, **options)
        if name == "dense":
            plan._flex = lambda *_: None  # type: ignore[method-assign]
        with tree_attention(model), bench.measure(f"packed = separate, {name}", ""):
            token_ids, positions = plan.inputs
            hidden = (
                model.base_model(
                    input_ids=token_ids[None],
                    position_ids=positions[None],
                    use_cache=False,
                    attention_plan=plan,
                )
                .last_hidden_state[0]
                .index_select(0, batch.sources)
            )
            logprobs, gradient = _logprobs_and_gradient(model, batch, hidden)
            gap = float((logprobs - expected[0]).abs().max())
            off = float((gradient - expected[1]).norm() / expected[1].norm())
        check(bench, f"packed = separate, {name}: log-probabilities", gap, 1e-4, "nats")
        check(bench, f"packed = separate, {name}: gradient", off, 1e-4, "of its norm")


def _logprobs_and_gradient(
    model: torch.nn.Module, batch: TreeBatch, hidden: Tensor
) -> tuple[Tensor, Tensor]:
    targets = batch.token_ids[batch.sampled]
    found = scores.chunked_scores(OutputHead(model), hidden, targets, batch.temperatures, 2048)[0]
    model.zero_grad(set_to_none=True)
    found.sum().backward()
    grads = [weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]
    return found.detach(), torch.cat(grads)


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
    """FSDP2 at world size 1, its shards on the device or in the host's memory, against the plain
    learner: three updates in float32."""
    learn = LearnSettings(lr=1e-4, max_pack_tokens=bench.pick(8192, 512))
    make = functools.partial(
        bench.model, NAME, torch.float32, num_hidden_layers=bench.pick(_LAYERS, 2)
    )
    trees = Workload.of(bench.pick(4000, 128), 1.6).trees(bench.tokens(NAME, 5, 8192))
    plain = Learner(make(), learn, LossSettings(), length_constant=512)
    start = {name: weight.clone() for name, weight in plain_weights(plain.model).items()}
    for _ in range(3):
        plain.learn(trees)
    expected = plain_weights(plain.model)
    moved = distance_of(expected, start)
    for where, offload in (("the device", False), ("the host's memory", True)):
        what = f"FSDP2 at world size 1, shards in {where}: weights"
        if not bench.has_time(what):
            return
        try:
            with bench.measure(what, "of the way"), one_rank(learn, offload=offload) as maker:
                learner = maker(make())
                for _ in range(3):
                    learner.learn(trees)
                off = distance_of(dict(learner.stream()), expected) / moved
        except CannotShard as reason:
            bench.add(what, None, "of the way", note=f"not run: {reason}")
            continue
        check(bench, what, off, 1e-5, "of the way")


def distance_of(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Returns the Euclidean distance of two sets of weights."""
    squares = [(ours[name] - theirs[name]).double().pow(2).sum() for name in theirs]
    return float(torch.stack(squares).sum().sqrt())
