"""Learning from trees on a card: every way of `benchmarks.arms` on every shape of
`benchmarks.workloads`, and how far its gradients are from those in float32."""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.arms import PACKED, ROWS, Arm, distance, gradients
from benchmarks.arms import arms as arms_of
from benchmarks.card.bench import Bench, Work, check
from benchmarks.flops import forward_flops
from benchmarks.workloads import Counts, Workload, workloads
from treegraft.policy.learn.optimiser import MasterAdamW
from treegraft.policy.load import with_adapters
from treegraft.policy.shapes import ModelShape
from treegraft.settings.policy import LearnSettings, LoraSettings, ModelSettings

MAX_TOKENS = 1 << 16
"""Of a micro-batch, in every arm."""
OTHER_TILES = "packed, torch's tiles"
SMALL = "qwen2.5-1.5b"
LARGE = "qwen3-4b"
RANKS: Mapping[str, int] = {SMALL: 0, LARGE: 16}
"""Of the adapters; 0: all weights learn."""
CELLS: Sequence[tuple[str, str, Sequence[str]]] = (
    (SMALL, "D", (ROWS, PACKED, OTHER_TILES)),
    (SMALL, "S", (ROWS, PACKED)),
    (SMALL, "C", (ROWS, PACKED)),
    (SMALL, "G", (ROWS, PACKED)),
    (SMALL, "A", (ROWS, PACKED)),
    (SMALL, "D", ("gathered keys", "prompt once")),
    (SMALL, "S", ("gathered keys", "prompt once")),
    (SMALL, "C", ("gathered keys", "prompt once")),
    (LARGE, "D", (ROWS, PACKED)),
    (SMALL, "D", ("padded",)),
)
"""What is measured, the most important first."""
ERROR_SHAPES = ("D", "S")


def arms(bench: Bench) -> list[Work]:
    """Returns the works that time a step: forward, backward and AdamW."""
    held: dict[str, tuple[Any, MasterAdamW]] = {}
    return [
        Work(
            f"{model}, {shape}: {', '.join(names)}",
            functools.partial(_time, held=held, model=model, shape=shape, names=names),
        )
        for model, shape, names in CELLS
    ]


def _time(
    bench: Bench,
    held: dict[str, tuple[Any, MasterAdamW]],
    model: str,
    shape: str,
    names: Sequence[str],
) -> None:
    """Adds a row for each arm. `held` has the last model, which the next work may need too."""
    if model not in held:
        held.clear()
        network = _checkpointed(bench.model(model), RANKS[model])
        held[model] = network, MasterAdamW(network, LearnSettings())
    network, optimiser = held[model]
    load = workloads(bench.pick(1.0, 1 / 200))[shape]
    trees = load.trees(bench.tokens(model, 0, 1 << 15))
    makers = arms_of(network, trees, bench.pick(MAX_TOKENS, 512))
    for name in names:
        what = f"{model}, {shape}: {name}"
        if name not in makers or not bench.has_time(what):
            continue
        with bench.measure(what, "s"):
            if bench.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            arm = makers[name]()
            # With a rate of 0 the weights stay, so that no arm changes what the next one computes.
            step = functools.partial(_step, arm, optimiser)
            first = bench.timed(step)
            seconds = [bench.timed(step) for _ in range(bench.pick(3, 1))]
            median = statistics.median(seconds)
            of_rows = median if name == ROWS else _seconds_of(bench, f"{model}, {shape}: {ROWS}")
            details = cell(bench, bench.shape(model), load, median, of_rows)
            details |= {"first_s": first - median, "slowest_s": max(seconds)}
            bench.add(what, median, "s", details=details)


def _checkpointed(model: Any, rank: int = 0) -> Any:
    settings = ModelSettings(gradient_checkpointing=True, lora=LoraSettings(rank=rank))
    return with_adapters(model, settings, seed=0)


def _step(arm: Arm, optimiser: MasterAdamW) -> None:
    arm.run()
    optimiser.step(lr=0.0)


def _seconds_of(bench: Bench, what: str) -> float | None:
    """The value of the newest row of this name, which another process may have written."""
    rows = [json.loads(one) for one in bench.file_lines()]
    return next((row["value"] for row in reversed(rows) if row["what"] == what), None)


def cell(
    bench: Bench, shape: ModelShape, load: Workload, seconds: float, rows_s: float | None
) -> dict[str, float | None]:
    """Returns the numbers of one step of `seconds`: tokens a second, the share of the card's
    operations that the unique tokens need (activations that are computed again are not counted),
    how many times as fast as rows without padding, and how much that is of the most that sharing
    allows, the ratio of operations."""
    unique = operations(shape, load.unique)
    flat = operations(shape, load.flat)
    found: dict[str, float | None] = {
        "raw_tokens_s": load.flat.tokens / seconds,
        "unique_tokens_s": load.unique.tokens / seconds,
        "times_rows": None if rows_s is None else rows_s / seconds,
        "limit": flat / unique,
        "limit_frac": None if rows_s is None else rows_s / seconds / (flat / unique),
    }
    if bench.card is not None:
        found["mfu"] = 3.0 * unique / seconds / bench.card.flops
    if bench.device.type == "cuda":
        found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return found


def operations(shape: ModelShape, counts: Counts) -> float:
    """Returns the operations of one forward pass."""
    seen = counts.pairs / counts.tokens
    scored = counts.scored / counts.tokens
    return forward_flops(shape, seen, scored) * counts.tokens


def errors(bench: Bench) -> list[Work]:
    """Returns the works that compare gradients in bfloat16 with those of rows in float32, at an
    eighth of the lengths."""
    return [Work(shape, functools.partial(_errors, shape=shape)) for shape in ERROR_SHAPES]


def _errors(bench: Bench, shape: str) -> None:
    load = workloads(bench.pick(1 / 8, 1 / 200))[shape]
    trees = load.trees(bench.tokens(SMALL, 0, 1 << 14))
    rounded = _checkpointed(bench.model(SMALL))
    # The same weights, rounded ones too: what differs is the arithmetic.
    exact = _checkpointed(bench.model(SMALL, torch.float32))
    exact.load_state_dict(rounded.state_dict())
    max_tokens = bench.pick(MAX_TOKENS, 512)
    expected = gradients(exact, arms_of(exact, trees, max_tokens)[ROWS]())
    of_rows: float | None = None
    for name, make in arms_of(rounded, trees, max_tokens).items():
        what = f"{SMALL}, {shape} / 8, bfloat16: {name}: gradient off float32 rows'"
        if not bench.has_time(what):
            return
        with bench.measure(what, "of its norm"):
            gap = distance(gradients(rounded, make()), expected)
            if of_rows is None:
                bench.add(what, gap, "of its norm")
                of_rows = gap
            else:
                # No farther than rows are, but for the noise of one draw.
                check(bench, what, gap, 1.25 * of_rows, "of its norm")
