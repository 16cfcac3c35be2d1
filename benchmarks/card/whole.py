"""Part 4: one whole update of 16 trees by phase: by the native engine, for which torch is enough,
and by a vLLM server where there is one."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import json
import os
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.card.bench import Bench, Work, check, first_line
from benchmarks.card.trees import Workload
from benchmarks.speed.plans import arpo_tree, grow_plan
from treegraft.core.interfaces import Request
from treegraft.core.types import Sampling
from treegraft.policy.engine.native import NativeEngine
from treegraft.policy.learn.learner import Learner
from treegraft.settings.policy import EngineSettings, LearnSettings, LossSettings, NativeSettings

NAME = "qwen2.5-1.5b"
LATE_S = 195.0
"""After so many seconds of a run its servers' logs are copied: its work ends after 210."""
RECIPE = Path(__file__).parents[2] / "recipes/demo.toml"


def works(bench: Bench) -> list[Work]:
    """Returns the works of this part."""
    return [
        Work("1.5B, native engine", _update, 100.0),
        *(
            Work(
                f"1.5B, {name}",
                functools.partial(_served, name=name, more=more),
                # A server starts slowly on a CPU that others use too.
                bench.pick(100.0, 500.0),
                110.0,
            )
            for name, more in SERVED.items()
        ),
    ]


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


SERVED: Mapping[str, Mapping[str, Any]] = {
    "vLLM server": {},
    "vLLM server that sleeps, weights by memory": {
        "engine.vllm.sleep": True,
        "publish.kind": "memory",
    },
}
"""Settings of each run beside those of `served_settings`."""


def _served(bench: Bench, name: str, more: Mapping[str, Any]) -> None:
    """Two updates of `train` with a server beside the learner on one card, where vLLM is here."""
    what = f"1.5B, {name}"
    if importlib.util.find_spec("pydantic") is None:
        bench.add(what, None, "s", note="left out: no pydantic here, so no settings of a run")
        return
    from treegraft.core.errors import SettingError
    from treegraft.policy.engine.vllm.build import find_python
    from treegraft.settings.load import load_config
    from treegraft.settings.policy import VllmSettings
    from treegraft.train import train

    python = os.environ.get("TREEGRAFT_VLLM_PYTHON")
    try:
        find_python(VllmSettings(python=python))
    except SettingError as reason:
        bench.add(what, None, "s", note=f"left out: {first_line(reason)}")
        return
    assert bench.file is not None
    with tempfile.TemporaryDirectory(dir=bench.file.parent) as folder:
        config = load_config(RECIPE, served_settings(bench, folder, python, more))
        begun = time.perf_counter()
        # Where this process is ended, nothing of the servers' folder is left.
        late = threading.Timer(LATE_S, _keep_logs, (Path(folder), bench.file.parent))
        late.daemon = True
        late.start()
        try:
            run = train(config, display=False)
        finally:
            late.cancel()
            _keep_logs(Path(folder), bench.file.parent)
        seconds = time.perf_counter() - begun
        updates = [
            json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()
        ]
    last = updates[-1]
    for key in ("rollout", "learn", "publish", "update"):
        bench.add(f"{what}: {key}", last[f"time/{key}_s"], "s")
    bench.add(f"{what}: start, two updates and end", seconds, "s")
    gap, limit = (last.get(f"learn/engine_gap{end}", float("nan")) for end in ("", "_limit"))
    check(bench, f"{what}: learn/engine_gap", gap, limit, "nats")
    for key, unit in NUMBERS.items():
        bench.add(f"{what}: {key}", last.get(key), unit)


NUMBERS = {
    "time/publish_bytes": "bytes",
    "learn/canary_gap": "nats",
    "time/engine_restarts": "times",
    "rollout/num_sampled_tokens": "tokens",
}
"""Metrics that tell whether server and learner agree."""


def served_settings(
    bench: Bench, folder: str, python: str | None, more: Mapping[str, Any]
) -> list[str]:
    """Returns the settings of that run over the demo's: ARPO, random weights of 1.5B."""
    found = {
        "run.dir": folder,
        "run.name": "whole",
        "run.num_updates": 2,
        "run.tasks_per_update": bench.pick(16, 2),
        "explore.explorers": ["entropy"],
        "rollout.max_completion_tokens": bench.pick(1024, 60),
        # Random weights earn the same everywhere: without it no group would be learned from.
        "loss.entropy_coef": 1e-4,
        "engine.kind": "vllm",
        "engine.vllm.start_timeout_s": bench.pick(180, 500),
        "eval.every": 0,
        "eval.at_start": False,
        "eval.at_end": False,
        "warmup.num_steps": 0,
        "checkpoint.every": 0,
        **more,
    }
    if bench.is_tiny:
        # vLLM for CPUs does not sleep.
        found.pop("engine.vllm.sleep", None)
    if python is not None:
        found["engine.vllm.python"] = python
    if not bench.is_tiny:
        found |= {
            "model.path": f"shape:{NAME}",
            "model.dtype": "bfloat16",
            "model.gradient_checkpointing": True,
            "engine.vllm.server_args": ["--gpu-memory-utilization", "0.4"],
        }
    return [f"{name}={json.dumps(value)}" for name, value in found.items()]


def _keep_logs(folder: Path, out: Path) -> None:
    """Copies the servers' logs: what a failure on them says is found there alone."""
    for log in [*folder.rglob("server-*.log"), *folder.rglob("*-server-*.log")]:
        with contextlib.suppress(OSError):
            (out / f"part-4-{log.name}").write_bytes(log.read_bytes()[-100_000:])
