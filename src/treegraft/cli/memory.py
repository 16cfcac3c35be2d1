"""The memory that is free on a machine, and an estimate of what a recipe needs.

The estimate is one formula. For N weights of b bytes, of which T learn, the GPU of one of R ranks
holds

    weights N·b (if R > 1, those of two layers), master weights 4·T / R (bfloat16, or R > 1),
    gradients 4·T / R, AdamW 8·T / R, the activations of a pack, the logits of a chunk

as `ModelShape.learner_parts` counts them. On the first rank the native engine holds N·b once more,
and for each token keys and values of 2 · layers · key-value heads · head width · b. A server of
vLLM takes the share of its GPUs that it is told.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from treegraft.core.errors import ModelError, SettingError
from treegraft.core.finding import Finding
from treegraft.policy.shapes import BYTES, ModelShape
from treegraft.settings.config import Config


@dataclass(frozen=True, slots=True)
class Room:
    """Memory in bytes. Room(free=3_000_000_000, whole=8_000_000_000, place="this machine")"""

    free: int
    whole: int
    place: str
    """Whose it is, in words."""


def _meminfo() -> Room | None:
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        sizes = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        return Room(sizes["MemAvailable"], sizes["MemTotal"], "this machine")
    with contextlib.suppress(ValueError, OSError, AttributeError):  # systems without /proc
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Room(whole, whole, "this machine")
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


def gpu_room() -> Room | None:
    """Returns the memory of the first GPU; None without one."""
    for line in _nvidia_smi("memory.free,memory.total", "--format=csv,noheader,nounits"):
        with contextlib.suppress(ValueError):
            free, whole = (int(one) * 2**20 for one in line.split(","))
            return Room(free, whole, "the GPU")
    return None


def gpus() -> list[str]:
    """Returns the NVIDIA GPUs as their driver names them; empty without a driver."""
    return _nvidia_smi("name,memory.total", "--format=csv,noheader")


def _nvidia_smi(columns: str, form: str) -> list[str]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, f"--query-gpu={columns}", form]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = found.stdout.splitlines() if found.returncode == 0 else []
    return [line.strip() for line in lines if line.strip()]


def gigabytes(num_bytes: float) -> str:
    """Returns a size for people: "512 MB", "2.1 GB"."""
    return f"{num_bytes / 1e9:.1f} GB" if abs(num_bytes) >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


# ---------------------------------------------------------------------- what a recipe needs

CARDS = {"H200": 141, "H100": 80, "A100": 80, "L40S": 48}
"""Memory of cards in 10^9 bytes, by their data sheets."""
SERVER_SHARE = 0.92
"""Of each of its GPUs that a server takes unless it is told: the default of
--gpu-memory-utilization in vLLM 0.32."""
_PROMPT_TOKENS = 256
"""Assumed length of a prompt if the context has no limit of its own."""
_PACKAGES_BYTES = 400_000_000
"""Resident after importing torch, transformers and peft, as measured."""
_ADVICE = (
    "It takes less with learn.max_pack_tokens=2048, model.gradient_checkpointing=true,"
    " model.dtype=bfloat16 or model.lora.rank=16, with several ranks learn.offload=true, beside"
    " servers engine.vllm.sleep=true; `treegraft doctor RECIPE --gpus 8` says what eight GPUs hold"
)
_PASSING = ("gathered layers", "activations", "logits")
"""Parts of a learner that are there while it learns, and go before servers come back."""


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
        room = gpu_room()
        if room is None:
            return cls(room=memory_room(), num_gpus=0, num_ranks=1)
        ranks = 1 if config.learn.ranks == "auto" else config.learn.ranks
        return cls(room=room, num_gpus=len(gpus()), num_ranks=ranks)

    @classmethod
    def planned(cls, config: Config, num_gpus: int, card: str) -> Place:
        """Returns GPUs that need not be here, by name, such as "A100", or "A100:40" for those with
        another memory, in 10^9 bytes.

        Raises:
            SettingError: the card is not known, or the memory is no number above 0.
        """
        name, colon, size = card.partition(":")
        known = {one.lower(): memory for one, memory in CARDS.items()}.get(name.lower())
        if known is None or (colon and not (size.isascii() and size.isdigit() and int(size))):
            raise SettingError(
                f"--gpu: got '{card}', expected one of {', '.join(CARDS)}; for another card take"
                f" the nearest with its memory in GB, as in {name if known else 'H100'}:96",
                code="unknown-card",
            )
        memory = (int(size) if colon else known) * 10**9
        ranks = config.learn.ranks
        if ranks == "auto":
            # As many as torchrun is given: all GPUs but those that a recipe names for servers.
            num_named = len(_server_gpus(config))
            ranks = num_gpus - num_named if num_gpus > num_named else num_gpus
        room = Room(memory, memory, f"each {name.upper()}")
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
    the one that holds a rank and the most besides."""
    parts = shape.learner_parts(config, place.num_ranks)
    width = BYTES[config.model.dtype]
    weights = float(shape.num_weights * width)
    path = _path_tokens(config) * shape.kv_bytes(width)
    native = config.engine.native
    if not place.num_gpus:
        del parts["reserved"]
        # The engine pads small batches to 16 rows.
        leaves = max(config.explore.num_leaves * config.run.tasks_per_update, 16)
        rows = min(config.engine.max_rows, leaves)
        parts["Python and packages"] = _PACKAGES_BYTES
        parts["engine's weights"] = weights
        parts["engine's packed weights"] = weights
        parts["keys and values"] = min(rows * path, 1e9 * native.cpu_cache_gb)
    elif config.engine.kind != "vllm":
        parts["engine's weights"] = weights
        # The least: the engine takes what is left of the GPU.
        parts["keys and values of a path"] = path
    elif taken := _num_servers_beside(config, place) * _server_bytes(config, place):
        if config.engine.vllm.sleep:
            # They leave while a pass runs; what the driver takes stays.
            passing = sum(parts.get(name, 0.0) for name in _PASSING)
            taken = max(taken - passing, shape.RESERVED)
        parts["servers"] = taken
    return parts


def _path_tokens(config: Config) -> int:
    """Tokens of the longest path."""
    if config.model.path == "tiny":
        return config.model.tiny.max_context
    limit = max(config.rollout.max_completion_tokens, config.eval.max_completion_tokens or 0)
    return _PROMPT_TOKENS + limit


def _server_gpus(config: Config) -> Counter[str]:
    """How many servers there are on each of the GPUs that a recipe names for them."""
    vllm = config.engine.vllm
    taken: Counter[str] = Counter()
    if config.engine.kind == "vllm" and vllm.gpus and not vllm.servers:
        for number in range(vllm.num_servers):
            entry = vllm.gpus[number % len(vllm.gpus)]
            taken.update(gpu.strip() for gpu in entry.split(","))
    return taken


def _num_servers_beside(config: Config, place: Place) -> int:
    """The most servers that share the GPU of one rank."""
    vllm = config.engine.vllm
    if config.engine.kind != "vllm" or vllm.servers:
        return 0
    if not vllm.gpus:
        # They have the GPUs in turn, and the first rank has the first.
        return math.ceil(vllm.num_servers / place.num_gpus)
    taken = _server_gpus(config)
    return max(taken[str(rank)] for rank in range(place.num_ranks))


def _server_bytes(config: Config, place: Place) -> float:
    """What a server takes of each of its GPUs, keys and values included."""
    arguments = " ".join(config.engine.vllm.server_args)
    share = re.search(r"--gpu-memory-utilization[ =](\d*\.?\d+)", arguments)
    whole = 0 if place.room is None else place.room.whole
    return (float(share[1]) if share else SERVER_SHARE) * whole


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
        note = f"'{config.model.path}' is not on this machine yet, so its size is not known"
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
    if room.free == room.whole:
        note = f"{room.place} has {gigabytes(room.whole)}"
    if left >= 0 and (path := parts.get("keys and values of a path", 0.0)):
        num_paths = 1 + int(left // path)
        note += f", room for {num_paths:,} paths of {_path_tokens(config):,} tokens at a time"
    if servers := parts.get("servers", 0.0):
        share = max(0.0, (left + servers) / room.whole / _num_servers_beside(config, place))
        note += f"; the learner leaves each server {share:.2f} of it (--gpu-memory-utilization)"
    if left < 0:
        note += f". {_ADVICE}"
    return [*found, Finding("sum", gigabytes(total), left >= 0, note)]
