"""The memory that is free on this machine, and the shape of a recipe's model, read without loading
it."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from treegraft.core.errors import ModelError, TreegraftError
from treegraft.core.locate import locate
from treegraft.core.packages import require
from treegraft.policy.shapes import (
    PREFIX,
    ModelShape,
    num_shape_weights,
    published_shape,
    shape_named,
)
from treegraft.settings.config import Config
from treegraft.tasks.build import build_tasks

_TINY_WORDS = 16
"""Markup, tags of tools and special tokens of a tiny model's vocabulary, beside the tasks'
words."""


# --- what is there --------------------------------------------------------------------------------


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


def _control_groups(root: Path) -> Iterator[Room]:
    """The limits of this process's control group and of those above it, of version 2 and 1."""
    own = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        own = next((line.rpartition(":")[2] for line in lines if line.startswith("0::")), "")
    folder = root / own.strip("/")
    # In a container the path may be the host's, of which only the root is to be seen.
    folders = [folder, *folder.parents][: len(folder.parts) - len(root.parts) + 1]
    files = [(one, "memory.max", "memory.current", "inactive_file") for one in folders]
    version_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    for place, limit_file, used_file, cached in (*files, (root / "memory", *version_1)):
        with contextlib.suppress(OSError, ValueError, IndexError):
            limit = int((place / limit_file).read_text(encoding="ascii"))
            used = int((place / used_file).read_text(encoding="ascii"))
            stat = (place / "memory.stat").read_text(encoding="ascii")
            # Read files count as used, and make room when it is wanted.
            reclaimed = int(stat.partition(f"\n{cached} ")[2].split()[0])
            yield Room(max(0, limit - used + reclaimed), limit, "this control group")


def memory_room(root: Path = Path("/sys/fs/cgroup")) -> Room | None:
    """Returns the memory that this process may still take: of the machine, or of a control group
    that allows less; None where neither is known."""
    rooms = [room for room in (_meminfo(), *_control_groups(root)) if room is not None]
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
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


# --- the shape of a model -------------------------------------------------------------------------


def _words(config: Config) -> Collection[str]:
    """The words of the tasks; none where they cannot be had, which is reported elsewhere."""
    try:
        return set(build_tasks(config.tasks, config.run.seed).vocabulary())
    except TreegraftError:
        return ()


def _tiny_shape(config: Config) -> ModelShape:
    tiny = config.model.tiny
    vocab = len(_words(config)) + _TINY_WORDS
    head_dim = tiny.hidden_size // tiny.num_heads
    # In columns of width hidden_size: query and output, key and value, the three matrices of the
    # feed-forward part, two norms; embeddings and head are not tied.
    width = 2 * tiny.hidden_size + 2 * tiny.num_kv_heads * head_dim
    layer = width + 3 * tiny.intermediate_size + 2
    return ModelShape(
        num_weights=(tiny.num_layers * layer + 2 * vocab + 1) * tiny.hidden_size,
        num_layers=tiny.num_layers,
        num_kv_heads=tiny.num_kv_heads,
        head_dim=head_dim,
        hidden_size=tiny.hidden_size,
        vocab_size=vocab,
    )


def _folder_shape(folder: Path) -> ModelShape:
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    # Models that also see keep the language model's settings one level down.
    settings = settings.get("text_config", settings)
    num_weights = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            # The header alone: eight bytes of length, then JSON with every shape.
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        num_weights += sum(math.prod(tensor["shape"]) for tensor in header.values())
    if not num_weights:
        raise ModelError(
            f"model folder '{folder}' has a config.json but no .safetensors file with weights.",
            code="weights-missing",
        )
    return ModelShape.of_config(settings, num_weights)


@functools.cache  # reading it takes seconds
def _gguf_shape(path: Path) -> ModelShape:
    from gguf import GGUFReader

    reader = GGUFReader(path)
    # Names begin with the architecture, such as "llama.block_count".
    fields = {name.partition(".")[2]: field for name, field in reader.fields.items()}
    names = ("attention.head_count", "attention.head_count_kv", "embedding_length", "block_count")
    if missing := [name for name in names if name not in fields]:
        raise ModelError(
            f"model file '{path}' does not say its '{missing[0]}'; is it a language model?",
            code="gguf-invalid",
        )
    heads, num_kv_heads, width, num_layers = (int(fields[name].contents()) for name in names)
    sizes = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors}
    return ModelShape(
        num_weights=sum(sizes.values()),
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=width // heads,
        hidden_size=width,
        vocab_size=sizes["token_embd.weight"] // width,
    )


def model_shape(config: Config) -> ModelShape | None:
    """Returns the shape of the recipe's model without loading it; None for a hub model that is
    neither here nor of a published shape by its name.

    Raises:
        ModelError: no such folder or package, or nothing to load in it.
    """
    path = config.model.path
    if path == "tiny":
        return _tiny_shape(config)
    if path.startswith(PREFIX):
        fields = published_shape(path)
        return ModelShape.of_config(fields, num_shape_weights(fields))
    place, gguf = locate(path)
    if gguf is not None:
        require(f"model file '{Path(place) / gguf}'", "gguf")
        return _gguf_shape(Path(place) / gguf)
    if Path(place).is_dir():
        return _folder_shape(Path(place))
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path):
        raise ModelError(
            f"model.path '{path}': no such folder, and no name of a model on a hub.",
            code="model-missing",
        )
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(path, "config.json")
    folder = Path(found).parent if isinstance(found, str) else None
    if folder and any(folder.glob("*.safetensors")):
        return _folder_shape(folder)
    named = shape_named(path)
    return None if named is None else ModelShape.of_config(named, num_shape_weights(named))
