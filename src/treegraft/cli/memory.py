"""The memory that is free on a machine, and an estimate of what a recipe needs.

The estimate is one formula. For N weights of b bytes, of which T learn, the GPU of one of R ranks
holds

    weights N·b (if R > 1, those of two layers), master weights 4·T / R (bfloat16, or R > 1),
    gradients 4·T / R, AdamW 8·T / R, the activations of a pack, the logits of a chunk

as `ModelShape.learner_parts` counts them. On the first rank the native engine holds N·b once more,
and for each token keys and values of 2 · layers · key-value heads · head width · b.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from treegraft.core.errors import ModelError, SettingError
from treegraft.core.finding import Finding
from treegraft.policy.shapes import BYTES, ModelShape
from treegraft.settings.config import Config

_PROMPT_TOKENS = 256
"""Assumed length of a prompt if the context has no limit of its own."""
_PACKAGES_BYTES = 400_000_000
"""Resident after importing torch, transformers and peft, as measured."""
_ADVICE = (
    "It takes less with learn.max_pack_tokens=2048, model.gradient_checkpointing=true,"
    " model.dtype=bfloat16 or model.lora.rank=16; `treegraft doctor RECIPE --gpus 8` says"
    " what eight GPUs hold"
)


@dataclass(frozen=True, slots=True)
class Room:
    """Memory in bytes. Room(free=3_000_000_000, whole=8_000_000_000, place="this machine")"""

    free: int
    whole: int
    place: str
    """Whose it is, in words."""


def _meminfo() -> Room | None:
    with contextlib.suppress(OSError, ValueError, KeyError):  # systems without /proc
        sizes = {}
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            name, _, size = line.partition(":")
            sizes[name] = int(size.split()[0]) * 1024
        return Room(sizes["MemAvailable"], sizes["MemTotal"], "this machine")
    return None


def _control_group(folder: Path) -> Room | None:
    """The limit of this process's control group, as of a container."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        limit = int((folder / "memory.max").read_text(encoding="ascii"))
        used = int((folder / "memory.current").read_text(encoding="ascii"))
        stat = (folder / "memory.stat").read_text(encoding="ascii")
        # Read files count as used, and make room when it is wanted.
        reclaimed = int(stat.partition("\ninactive_file ")[2].split()[0])
        return Room(max(0, limit - used + reclaimed), limit, "this control group")
    return None


def memory_room(folder: Path = Path("/sys/fs/cgroup")) -> Room | None:
    """Returns the memory that this process may still take: of the machine, or of a control group
    that allows less; None if neither is known."""
    rooms = [room for room in (_meminfo(), _control_group(folder)) if room is not None]
    return min(rooms, key=lambda room: room.free, default=None)


def gpus() -> dict[str, Room]:
    """Returns the memory of the NVIDIA GPUs by number and name; empty without a driver."""
    query = ["nvidia-smi", "--query-gpu=index,name,memory.free,memory.total"]
    if shutil.which(query[0]) is None:
        return {}
    # A driver that hangs must not hold up `doctor`.
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        said = subprocess.run(
            [*query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
        found = {}
        for line in said.stdout.splitlines():
            number, name, free, whole = line.split(",")
            room = Room(int(free) << 20, int(whole) << 20, "the GPU")
            found[f"{number}:{name}, {gigabytes(room.whole)}"] = room
        return found
    return {}


def gigabytes(num_bytes: float) -> str:
    """Returns a size for people: "512 MB", "2.1 GB"."""
    return f"{num_bytes / 1e9:.1f} GB" if abs(num_bytes) >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a recipe is to run. Place(room=Room(...), num_gpus=8, num_ranks=8)"""

    room: Room | None
    """Of this machine, or of each GPU; None if it is not known."""
    num_gpus: int
    """0: everything runs on the CPU."""
    num_ranks: int

    @classmethod
    def here(cls, config: Config) -> Place:
        """Returns this machine, with its GPUs if it has any."""
        rooms = [*gpus().values()]
        if not rooms:
            return cls(room=memory_room(), num_gpus=0, num_ranks=1)
        ranks = 1 if config.learn.ranks == "auto" else config.learn.ranks
        return cls(room=rooms[0], num_gpus=len(rooms), num_ranks=ranks)

    @classmethod
    def planned(cls, config: Config, num_gpus: int, gpu_gb: float = 80) -> Place:
        """Returns GPUs that need not be here, each with so much memory in 10^9 bytes."""
        # Data sheets count in 10^9 bytes, drivers in 2^20.
        room = Room(int(gpu_gb * 1e9), int(gpu_gb * 1e9), "each GPU")
        # "auto" takes as many as torchrun starts, commonly one for each GPU.
        ranks = num_gpus if config.learn.ranks == "auto" else config.learn.ranks
        return cls(room=room, num_gpus=num_gpus, num_ranks=ranks)

    @property
    def limit(self) -> float:
        """Bytes that a recipe may take."""
        if self.room is None:
            return math.inf
        # A tenth of a machine's memory is left to the system; a GPU's driver has a part of its own.
        return self.room.free if self.num_gpus else 0.9 * self.room.free


def needed(config: Config, shape: ModelShape, place: Place) -> dict[str, float]:
    """Returns the estimated bytes of each part of a run in this machine's memory or, on GPUs, on
    the one of the first rank, without servers of vLLM."""
    parts = shape.learner_parts(config, place.num_ranks)
    width = BYTES[config.model.dtype]
    weights = float(shape.num_weights * width)
    path = _path_tokens(config) * shape.kv_bytes(width)
    if place.num_gpus:
        if config.engine.kind != "vllm":
            parts["engine's weights"] = weights
            # The least: the engine takes what is left of the GPU.
            parts["keys and values of a path"] = path
        return parts
    del parts["reserved"]
    # The engine pads small batches to 16 rows.
    leaves = max(config.explore.num_leaves * config.run.tasks_per_update, 16)
    rows = min(config.engine.max_rows, leaves)
    parts["Python and packages"] = _PACKAGES_BYTES
    parts["engine's weights"] = weights
    # The kernels multiply with a copy of their own, in another order.
    parts["engine's packed weights"] = weights
    parts["keys and values"] = min(rows * path, 1e9 * config.engine.native.cpu_cache_gb)
    return parts


def _path_tokens(config: Config) -> int:
    """Tokens of the longest path."""
    if config.model.path == "tiny":
        return config.model.tiny.max_context
    limit = max(config.rollout.max_completion_tokens, config.eval.max_completion_tokens or 0)
    return _PROMPT_TOKENS + limit


def memory(config: Config, vocabulary: Sequence[str], place: Place) -> list[Finding]:
    """Returns the estimate by part, and at the end its sum against what there is.

    Args:
        vocabulary: words of the "tiny" model's tokenizer.
    """
    # Here, since it loads torch, and `doctor` without a recipe is to answer at once.
    from treegraft.policy.load import load_shape

    try:
        shape = load_shape(config.model, vocabulary)
    # The latter if a package that reads the weights is not installed.
    except (ModelError, SettingError) as error:
        return [Finding("model.path", config.model.path, False, str(error))]
    if shape is None:
        note = (
            f"'{config.model.path}' is not on this machine yet, so its size is not known; it is"
            " fetched from the hub when the run starts"
        )
        return [Finding("memory", "unknown", note=note, is_doubtful=True)]
    return memory_of(config, shape, place)


def memory_of(config: Config, shape: ModelShape, place: Place) -> list[Finding]:
    """Returns `memory` of a model of this shape."""
    parts = needed(config, shape, place)
    total = sum(parts.values())
    of_what = "one process"
    if place.num_gpus:
        of_what = f"a GPU that holds a rank, {place.num_ranks} of {place.num_gpus}"
    found = [
        Finding("estimate", of_what, note="by a formula; nothing of it was measured"),
        Finding("weights in all", f"{shape.num_weights / 1e6:,.1f} M"),
    ]
    for name, size in parts.items():
        found.append(Finding(name, gigabytes(size)))
    room = place.room
    left = place.limit - total
    if room is None:
        return [*found, Finding("sum", gigabytes(total))]
    note = f"{gigabytes(room.free)} of {gigabytes(room.whole)} of {room.place} are free"
    if left < 0:
        # In the order of what they cost: the first two change no result.
        note += f". {_ADVICE}"
    elif path := parts.get("keys and values of a path", 0.0):
        note += f", room for {1 + int(left // path):,} paths of {_path_tokens(config):,} tokens"
    elif place.num_gpus:
        note += f"; servers may take {left / room.whole:.2f} of it (--gpu-memory-utilization)"
    return [*found, Finding("sum", gigabytes(total), left >= 0, note)]
