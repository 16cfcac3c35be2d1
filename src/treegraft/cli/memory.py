"""An estimate of the memory that a recipe needs.

It is one formula, and nothing of it is measured. For N weights of b bytes, of which T learn, the
GPU of one of R ranks holds

    weights N·b (if R > 1, those of two layers), master weights 4·T / R (bfloat16, or R > 1),
    gradients 4·T / R, AdamW 8·T / R, the activations of a pack, the logits of a chunk

as `ModelShape.learner_parts` counts them. The native engine holds N·b once more, and for each token
keys and values of 2 · layers · key-value heads · head width · b.
"""

from __future__ import annotations

import os
import subprocess

from treegraft.core.finding import Finding
from treegraft.policy.shapes import BYTES, ModelShape
from treegraft.settings.config import Config

_PROMPT_TOKENS = 256
"""Assumed length of a prompt."""
_PACKAGES_BYTES = 400_000_000
"""Resident after importing torch, transformers and peft, as measured."""


def gigabytes(num_bytes: float) -> str:
    """Returns a size for people: "512 MB", "2.1 GB"."""
    return f"{num_bytes / 1e9:.1f} GB" if abs(num_bytes) >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def physical_memory() -> int:
    """Returns the memory of this machine in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def gpus() -> list[str]:
    """Returns the NVIDIA GPUs, each with its memory; empty without a driver."""
    # Asked of the driver: a build of torch without CUDA sees no GPU.
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        # A driver that hangs must not hold up `doctor`.
        said = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return said.stdout.splitlines()


def needed(
    config: Config, shape: ModelShape, num_ranks: int, *, on_gpu: bool = True
) -> dict[str, float]:
    """Returns the estimated bytes of each part of a run in the memory of its first rank, without
    servers of vLLM."""
    parts = shape.learner_parts(config, num_ranks)
    if not on_gpu:
        # In place of what a GPU's driver reserves.
        parts["reserved"] = _PACKAGES_BYTES
    # Servers have memory of their own, which vLLM divides itself.
    if config.engine.kind != "vllm":
        width = BYTES[config.model.dtype]
        # On CPUs the kernels multiply with a copy of their own, in another order.
        num_copies = 1 if on_gpu else 2
        parts["engine's weights"] = num_copies * shape.num_weights * width
        # On a GPU the least: the engine takes what is left of it.
        num_paths = 1 if on_gpu else config.engine.max_rows
        path = (_PROMPT_TOKENS + config.rollout.max_completion_tokens) * shape.kv_bytes(width)
        limit = 1e9 * config.engine.native.cpu_cache_gb
        parts["keys and values"] = min(num_paths * path, limit)
    return parts


def memory(config: Config, num_gpus: int | None = None) -> Finding:
    """Returns the estimate: of each of `num_gpus` GPUs, which need not be here, or against the
    memory of this machine.

    Raises:
        ModelError, SettingError: as of `load_shape`.
    """
    # Here, since it loads torch, and `doctor` without a recipe is to answer at once.
    from treegraft.policy.load import load_shape

    # Without the words of the tasks, whose embeddings in a "tiny" model are a few MB at most.
    shape = load_shape(config.model)
    # Its size is in the weights, which the hub sends at the start of the run.
    if shape is None:
        note = (
            f"'{config.model.path}' is not on this machine yet, so its size is not known; it is"
            " fetched from the hub when the run starts"
        )
        return Finding("memory", "unknown", note=note, is_doubtful=True)
    ranks = config.learn.ranks
    if ranks == "auto":
        # As many as torchrun starts, commonly one for each GPU.
        ranks = num_gpus or 1
    cards = gpus()
    on_gpu = bool(num_gpus or cards)
    parts = needed(config, shape, ranks, on_gpu=on_gpu)
    total = sum(parts.values())
    listed = ", ".join(f"{name} {gigabytes(size)}" for name, size in parts.items())
    note = f"by a formula, not measured: {listed}"
    # Nothing to compare with: those GPUs need not be here.
    if num_gpus:
        return Finding("memory", f"{gigabytes(total)} of each GPU that holds a rank", note=note)
    room = physical_memory()
    if cards:
        # Such as "NVIDIA H100, 81559 MiB".
        room = int(cards[0].split()[-2]) << 20
    value = f"{gigabytes(total)} of {gigabytes(room)}"
    if total < room:
        return Finding("memory", value, note=note)
    note += ". Set model.lora.rank = 16 or a lower learn.max_pack_tokens"
    return Finding("memory", value, False, note)
