"""Runs that learn on the card: the demo's tiny agent, which needs no weights, and SmolLM2-135M."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.card.bench import Bench, Work
from benchmarks.card.carry import HOME, MODEL, ROOT, WEIGHTS
from treegraft.policy.load import unpacked_gguf

SHOWN = (
    "reward/mean",
    "eval/accuracy",
    "rollout/completed_frac",
    "rollout/num_sampled_tokens",
    "learn/engine_gap",
    "time/rollout_s",
    "time/learn_s",
    "time/publish_s",
    "time/update_s",
)
_BARS = " ▁▂▃▄▅▆▇█"


TINY_RECIPE = "recipes/demo.toml"
AGENT_RECIPE = "recipes/smollm2_search.toml"


def tiny(bench: Bench) -> list[Work]:
    """Returns the work of the demo's agent: GRPO with learning from grafts."""
    return [Work("tiny agent", _tiny, 300.0)]


def _tiny(bench: Bench) -> None:
    _train(bench, "tiny agent", TINY_RECIPE, tiny_settings(bench.is_tiny))


def tiny_settings(is_rehearsal: bool) -> list[str]:
    """Returns the settings of the demo's agent over its recipe."""
    if is_rehearsal:
        few = ["run.num_updates=1", "run.tasks_per_update=2", "warmup.num_steps=2"]
        return ['explorers=["graft"]', *few, "tasks.num_eval=4"]
    return ['explorers=["graft"]', "run.num_updates=30"]


def agent(bench: Bench) -> list[Work]:
    """Returns the work of SmolLM2-135M, which learns to search by ARPO."""
    return [Work("SmolLM2-135M", _agent, 600.0)]


def _agent(bench: Bench) -> None:
    if not (MODEL / WEIGHTS).exists():
        here = ", ".join(sorted(file.name for file in MODEL.glob("piece-*"))) or "none"
        note = f"FAILED: the weights are not whole, of their pieces {here} came; see --pack"
        bench.add("SmolLM2-135M", None, "", note=note)
        return
    settings = agent_settings(bench.is_tiny)
    path = f"model.path={json.dumps(str(_folder()))}"
    _train(bench, "SmolLM2-135M", AGENT_RECIPE, [path, *settings])


def agent_settings(is_rehearsal: bool) -> list[str]:
    """Returns the settings of SmolLM2-135M over its recipe, except the model's place."""
    found = [
        'explore.explorers=["entropy"]',
        "checkpoint.every=0",
        "tasks.search_world.hops=[1]",
        "eval.num_samples=0",
        "learn.num_minibatches=1",
    ]
    if is_rehearsal:
        found += ["run.num_updates=1", "run.tasks_per_update=2", "warmup.num_steps=1"]
        found += ["warmup.batch_size=1", "rollout.max_completion_tokens=16", "tasks.num_eval=2"]
        found += ["explore.num_leaves=2", "explore.entropy.num_starts=1", "eval.every=0"]
        found += ["eval.at_start=false", "eval.at_end=false", "engine.native.cache_gb=0.2"]
        # Processors without matrix units are slow in bfloat16.
        return [*found, 'model.dtype="float32"']
    # The agent answers a tenth of the questions after so short a warm-up.
    found += ["run.num_updates=60", "run.tasks_per_update=16", "warmup.num_steps=6"]
    found += ["explore.num_leaves=16", "explore.entropy.num_starts=8"]
    found += ["rollout.max_completion_tokens=160", "tasks.num_eval=64", "eval.every=5"]
    return [*found, "learn.max_pack_tokens=16384", "engine.max_rows=256"]


def _folder() -> Path:
    """A folder with the model in bfloat16 and its tokenizer, which was converted before it was
    packed: from a GGUF file that takes half a minute."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    folder = HOME / "smollm2"
    if folder.exists():
        return folder
    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(
        MODEL, gguf_file=WEIGHTS, dtype=torch.bfloat16, **unpacked_gguf()
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    partial = folder.with_name("smollm2.partial")
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(partial)
    partial.rename(folder)
    return folder


def _train(bench: Bench, what: str, recipe: str, settings: Sequence[str]) -> None:
    """Adds a row for each update, and at the end one for each number over the updates. The run
    ends before its time does."""
    from treegraft.settings.load import load_config
    from treegraft.train import train

    assert bench.file is not None
    found: list[Mapping[str, float]] = []

    def took(update: int, metrics: Mapping[str, float]) -> bool:
        found.append(dict(metrics))
        details = {key: metrics[key] for key in SHOWN if key in metrics}
        bench.add(f"{what}: update {update}", metrics.get("reward/mean"), "reward", details=details)
        return bench.seconds < bench.until_s

    name = what.replace(" ", "-") + time.strftime("-%H%M%S")
    own = [f"run.dir={json.dumps(str(HOME / 'runs'))}", f"run.name={json.dumps(name)}"]
    config = load_config(ROOT / recipe, [*own, *settings])
    run = train(config, callbacks=[took], display=False)
    metrics = Path(run.run_dir) / "metrics.jsonl"
    (bench.file.parent / f"{what.replace(' ', '-')}.metrics.jsonl").write_bytes(
        metrics.read_bytes()
    )
    for key in SHOWN:
        values = [one[key] for one in found if key in one]
        if values:
            bench.add(f"{what}: {key}", statistics.median(values), "median", note=curve(values))


def curve(values: Sequence[float]) -> str:
    """Returns the numbers as bars between their smallest and their largest one."""
    low = min(values)
    high = max(values)
    steps = [round((one - low) / (high - low or 1.0) * (len(_BARS) - 1)) for one in values]
    bars = "".join(_BARS[step] for step in steps)
    return f"{bars} from {values[0]:.4g} to {values[-1]:.4g}"
