"""Learning: forward and backward of trajectories' log-probabilities from packed trees and by other
ways, against the same trajectories as rows without padding.

The ways and the shapes of the trees are those of `benchmarks.arms` and `benchmarks.workloads`.
Gradients are compared before any timing.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn

from benchmarks.arms import PACKED, ROWS, Arm, arms, distance, gradients
from benchmarks.speed.measure import Case, Row, Side, alternate, time_row
from benchmarks.speed.stage import Stage
from benchmarks.workloads import Counts, Workload, workloads
from treegraft.core.errors import EngineError
from treegraft.policy.output_head import base_model, decoder, layer_heads

SCALE = 1 / 64
QUICK_SCALE = 1 / 400
"""Of the lengths of the trees: of a measurement on a CPU, and of a test."""
MAX_TOKENS = 4096
"""Of a micro-batch."""
LIMITS = {"float32": 1e-5, "bfloat16": 0.15}
"""Largest norm of the difference of two gradients over the norm of the rows' one; bfloat16 is off
by .03 to .05 in any layout."""
MEMORY_SHAPES = ("D", "S")


def cases(stage: Stage) -> Mapping[str, Case]:
    """Returns the parts of `python -m benchmarks.speed update`."""
    found: dict[str, Case] = {}
    for dtype in LIMITS:
        for name in workloads():
            found[f"{name} {dtype}"] = partial(_time, stage, name, dtype)
    for dtype in LIMITS:
        for name in MEMORY_SHAPES:
            found[f"memory {name} {dtype}"] = partial(_memory, stage, name, dtype)
    return found


def load_of(stage: Stage, name: str) -> Workload:
    """Returns a shape at the size of the stage."""
    return workloads(stage.pick(SCALE, QUICK_SCALE))[name]


def arms_of(stage: Stage, name: str, dtype: str) -> tuple[Any, Mapping[str, Callable[[], Arm]]]:
    """Returns a model and the makers of its arms on a shape."""
    model = stage.load(dtype)[0]
    return model, arms(model, load_of(stage, name).trees(stage.text), MAX_TOKENS)


def _time(stage: Stage, name: str, dtype: str) -> Iterator[Row]:
    model, makers = arms_of(stage, name, dtype)
    chosen = list(makers) if dtype == "float32" else [ROWS, PACKED]
    made = {arm: makers[arm]() for arm in chosen}
    expected = gradients(model, made[ROWS])
    for arm in chosen[1:]:
        gap = distance(gradients(model, made[arm]), expected)
        if not gap <= LIMITS[dtype]:
            raise EngineError(
                f"benchmark: the gradients of '{arm}' and '{ROWS}' differ by {gap:.3g} of their"
                f" norm; expected at most {LIMITS[dtype]:g} in {dtype}. What is wrong is not worth"
                " timing."
            )
        stage.say(f"   {arm}: gradients differ by {gap:.2g} of their norm")
    del expected
    sides = {arm: _side(model, one) for arm, one in made.items()}
    seconds = alternate(sides, stage.num_runs, num_first=0)
    load = load_of(stage, name)
    most = multiplication_ratio(load, model)
    for arm in chosen[1:]:
        what = f"update, {name}, {load.ratio:.2f} tokens for each unique one, {dtype}: {arm}"
        row = time_row(what, f"{ROWS}, same dtype", seconds[arm], seconds[ROWS])
        stage.say(f"   {row.ratio / most:.0%} of {most:.2f}, the ratio of multiplications")
        yield row


def _side(model: Any, arm: Arm) -> Side:
    return Side(lambda _: arm.run(), before=lambda _: model.zero_grad(set_to_none=True))


def multiplication_ratio(load: Workload, model: Any) -> float:
    """Returns the multiplications of a forward pass over trajectories apart, over those of a packed
    one."""
    config = base_model(model).config.get_text_config()
    linear = sum(
        module.weight.numel()
        for module in decoder(model).modules()
        if isinstance(module, nn.Linear)
    )
    pair = 2 * config.num_attention_heads * sum(width for _, width in layer_heads(config))
    head = model.get_output_embeddings().weight.numel()

    def multiplications(counts: Counts) -> int:
        return int(linear * counts.tokens + pair * counts.pairs + head * counts.scored)

    return multiplications(load.flat) / multiplications(load.unique)


# ---------------------------------------------------------------------- memory


def _memory(stage: Stage, name: str, dtype: str) -> Iterator[Row]:
    """The rise of resident memory in fresh processes."""
    found: dict[str, list[float]] = {PACKED: [], ROWS: []}
    for _ in range(stage.num_runs):
        for arm, values in found.items():
            risen = _in_child(stage, name, arm, dtype)
            if risen is None:
                stage.note(
                    "left out: this system does not tell how much memory a process had at most"
                )
                return
            values.append(risen / 1e6)
    mine, other = (statistics.median(found[arm]) for arm in (PACKED, ROWS))
    yield Row(
        what=f"update memory, {name}, {dtype}, gradients included",
        against=ROWS,
        ratio=other / mine,
        ours=mine,
        theirs=other,
        unit="MB",
        num_runs=stage.num_runs,
    )


def _in_child(stage: Stage, name: str, arm: str, dtype: str) -> int | None:
    asked = {
        "arm": arm,
        "shape": name,
        "dtype": dtype,
        "model": stage.model,
        "is_quick": stage.is_quick,
        "num_threads": stage.threads,
        "folder": str(stage.folder),
    }
    command = [sys.executable, "-m", "benchmarks.speed.memory", json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise EngineError(
            f"benchmark: measuring memory failed: {done.stderr.strip().splitlines()[-1:]}"
        )
    risen: int | None = json.loads(done.stdout.strip().splitlines()[-1])
    return risen
