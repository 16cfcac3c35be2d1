"""The memory that a run of one process needs, estimated from the model's shape alone.

With N weights of b bytes:

    Python with its packages 0.4 GB, weights N·b, engine's copy N·b (2 N·b where it packs them),
    gradients 4·T (in float32 whatever b is), AdamW 8·T, float32 master weights 4·T (bfloat16 only),
    keys and values = rows · tokens · layers · 2 · key-value heads · head width · b

T counts trained weights: N, or those of the adapters. Activations are those of
`ModelShape.activation_bytes`, marked as rough: what kernels take beside them is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treegraft import Config, load_config
from treegraft.extras.lab.text import BYTES, PROMPT_TOKENS, gigabytes
from treegraft.parts import Finding, Machine, shapes, value_of

_PACKAGES_BYTES = 400_000_000
"""Resident after importing torch, transformers and peft, as measured."""


def memory_estimate(config: Config, shape: shapes.ModelShape) -> dict[str, int]:
    """Returns bytes by part; their sum is the peak of one process, rollout and learning
    together."""
    width, rank, native = BYTES[config.model.dtype], config.model.lora.rank, config.engine.native
    weights = shape.num_weights * width
    # An adapter adds rank · (in + out) to each of about seven matrices of a layer; 3 is the mean
    # width in hidden sizes.
    trained = shape.num_layers * 7 * rank * 3 * shape.hidden_size if rank else shape.num_weights
    limit = max(config.rollout.max_completion_tokens, config.eval.max_completion_tokens or 0)
    is_tiny = config.model.path == "tiny"
    context = config.model.tiny.max_context if is_tiny else PROMPT_TOKENS + limit
    # The engine pads small batches to 16 rows.
    leaves = max(config.explore.num_leaves * config.run.tasks_per_update, 16)
    rows = min(config.engine.max_rows, leaves)
    activations = shape.activation_bytes(
        config.learn.max_pack_tokens,
        width,
        is_checkpointed=config.model.gradient_checkpointing,
    )
    parts = {
        "Python and packages": _PACKAGES_BYTES,
        "weights": weights,
        "gradients": 4 * trained,
        "AdamW": 8 * trained,
        "float32 master weights": 4 * trained if width == 2 else 0,
        "engine's copy": weights,
        "engine's packed weights": weights if native.pack_weights else 0,
        # Under LoRA the reference is the same model with its adapters off.
        "reference": weights if config.loss.kl_coef > 0 and not rank else 0,
        "keys and values": min(
            rows * context * shape.kv_bytes(width), int(1e9 * native.cpu_cache_gb)
        ),
        "logits of one chunk, their gradients": (
            2 * config.learn.vocab_chunk * shape.vocab_size * width
        ),
        "activations (rough)": int(sum(activations)),
    }
    return {name: size for name, size in parts.items() if size}


_SAVINGS: tuple[Mapping[str, Any], ...] = (
    {"learn.max_pack_tokens": 2048, "engine.native.cache_gb": 1.0},
    {"model.gradient_checkpointing": True},
    {"engine.native.pack_weights": False},
    {"model.lora.rank": 16},
    {"model.dtype": "bfloat16"},
)
"""What takes less memory, in the order in which it is given up gladly; each keeps those before."""


def one_process(config: Config, machine: Machine, shape: shapes.ModelShape | None) -> list[Finding]:
    """Returns the parts of the memory estimate, and at the end the sum against what is free."""
    room = machine.room
    if shape is None:
        note = f"'{config.model.path}' is not on this machine yet, so its size is not known"
        return [Finding("memory", "unknown", note=note, is_doubtful=True)]
    parts = memory_estimate(config, shape)
    total = sum(parts.values())
    # A tenth is left to the system.
    fits = room is None or total < 0.9 * room.free
    note = ""
    if room is not None:
        said = f"{gigabytes(room.free)} of {gigabytes(room.whole)} of {room.place} are free"
        note = said if fits else f"{said}. {_advice(config, shape, 0.9 * room.free)}"
    rows = [Finding("weights in all", f"{shape.num_weights / 1e6:,.1f} M")]
    rows += [Finding(name, gigabytes(size)) for name, size in parts.items()]
    return [*rows, Finding("sum", gigabytes(total), fits, note)]


def _advice(config: Config, shape: shapes.ModelShape, limit: float) -> str:
    """Which settings would make it fit, or that none would."""
    given: dict[str, Any] = {}
    for settings in _SAVINGS:
        wanted = {name: value for name, value in settings.items() if _saves(config, name, value)}
        given |= wanted
        # As the command line reads them: true, not True.
        overrides = [f"{name}={str(value).lower()}" for name, value in given.items()]
        smaller = load_config(config, overrides)
        total = sum(memory_estimate(smaller, shape).values())
        if total < limit:
            return f"It would fit, with {gigabytes(total)}: {' '.join(overrides)}"
    least = gigabytes(total)
    return (
        f"Even with {' '.join(overrides) or 'the smallest settings'} it takes {least}: take a"
        " smaller model or a larger machine; `treegraft doctor RECIPE --gpus 8` says what several"
        " GPUs hold"
    )


def _saves(config: Config, name: str, value: Any) -> bool:
    if name.startswith("engine.native") and config.engine.kind != "native":
        return False
    now = value_of(config, name)
    if isinstance(value, (bool, str)) or isinstance(now, str):
        return bool(now != value)
    # Of adapters 0 means none, which takes the most.
    return bool(now == 0 if name == "model.lora.rank" else now > value)
