"""The model card of a checkpoint, made from its run folder; nothing private is in it."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from treegraft import Config
from treegraft.parts import RunReader, Trained, plain, setting_rows

SHOWN = (
    *("run", "model", "tasks", "format", "reward", "explore", "buffer", "rollout", "eval"),
    *("credit", "loss", "learn", "warmup"),
)
"""Tables of settings that a card holds; those of tools and environments may name private
services."""
LABELS = ("run.name", "run.dir", "run.num_threads")
PACKAGES = ("treegraft", "torch", "transformers", "peft", "safetensors")
GREEDY = "eval/accuracy"
MEASURES = (GREEDY, "eval/accuracy_sampled", "eval/pass_at_", "eval/pass_within_")


def public(value: Any) -> Any:
    """Returns a setting's value without absolute paths, and addresses without what may be secret in
    them."""
    if isinstance(value, Mapping):
        return {str(key): public(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [public(one) for one in value]
    if not isinstance(value, str):
        return value
    if re.match(r"[a-z][a-z0-9+.-]*://", value, re.I):
        return re.sub(r"://([^/]*@)?", "://", value).partition("?")[0]
    if re.match(r"[/~\\]|[A-Za-z]:[/\\]|\.\.?[/\\]", value):
        return re.split(r"[/\\]", value.rstrip("/\\"))[-1]
    return value


def base_model(config: Config) -> str | None:
    """Returns the hub id that training started from; None of folders, packages and "tiny"."""
    path = config.model.path
    is_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not Path(path).expanduser().exists()
    return path if is_hub_id and not path.startswith(".") else None


def model_card(of: Trained, name: str, *, licence: str | None = None) -> str:
    """Returns the card in Markdown.

    Args:
        name: its title, such as the repository's name.
        licence: the hub's id of a licence; None leaves it open.
    """
    base = base_model(of.config)
    head = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["treegraft", "reinforcement-learning", "tool-use"],
        license=licence,
        base_model=base,
        datasets=hub_datasets(of.config) or None,
    )
    parts = [
        f"---\n{head.to_yaml()}\n---\n",
        f"# {plain(name)}\n",
        "A language-model agent that uses tools, trained with Treegraft.\n",
        *_training(of, base, licence),
        *_held_out(of),
        *_settings(of.config),
        *_versions(),
        *_use(name),
    ]
    return "\n".join(parts)


def hub_datasets(config: Config) -> list[str]:
    """Returns the hub's names of the data sets that tasks come from."""
    if config.tasks.kind != "dataset":
        return []
    files = [*config.tasks.dataset.train, *config.tasks.dataset.eval]
    names = [file.split(":")[1] for file in files if file.startswith("hub:")]
    return [*dict.fromkeys(names)]


def _training(of: Trained, base: str | None, licence: str | None) -> Iterator[str]:
    config, state = of.config, of.state
    data = ", ".join(map(str, public(config.tasks.dataset.train)))
    tasks = config.tasks.kind if config.tasks.kind != "dataset" else data
    rows = {
        "method": of.method,
        "started from": base or str(public(config.model.path)),
        "training tasks": tasks,
        "checkpoint": f"update {state.update} of {config.run.num_updates}",
        "warm-up": f"{state.warmup_steps} steps of supervised fine-tuning",
        "trajectories": f"{config.explore.num_leaves} a task,"
        f" {config.run.tasks_per_update} tasks an update",
        "reward": ", ".join(config.reward.funcs),
        "tools": ", ".join(config.tools.use) or "those of the tasks",
        "seed": str(config.run.seed),
        "licence": licence or "not stated; see those of the base model and the data",
    }
    yield "## Training\n"
    yield "| | |\n|---|---|"
    yield "\n".join(f"| {name} | {_cell(value)} |" for name, value in rows.items()) + "\n"


def _held_out(of: Trained) -> Iterator[str]:
    yield "## Held-out results\n"
    update = of.state.update
    lines = [] if of.run_dir is None else RunReader(of.run_dir).clean_metrics()[0]
    line = next((line for line in lines if line["update"] == update), {})
    rows = [
        (key, "greedy" if key == GREEDY else _decoding(of.config), value)
        for key, value in line.items()
        for known in MEASURES
        if key == known or (known.endswith("_") and key.startswith(known))
    ]
    if not rows:
        yield f"No held-out evaluation of this checkpoint (update {update}) is recorded.\n"
        return
    tasks = of.config.tasks.num_eval
    yield f"Of this checkpoint (update {update}), on at most {tasks} held-out tasks.\n"
    yield "| measure | decoding | value |\n|---|---|---|"
    yield "\n".join(f"| `{key}` | {how} | {value:.1%} |" for key, how, value in rows) + "\n"


def _decoding(config: Config) -> str:
    names = ("temperature", "top_k", "top_p", "min_p")
    own, usual = config.eval, type(config.eval)()
    found = {name: getattr(own, name) for name in names}
    shown = (n for n in names if n == "temperature" or found[n] != getattr(usual, n))
    return ", ".join(f"{name} {found[name]:g}" for name in shown)


def _settings(config: Config) -> Iterator[str]:
    yield "## Settings that differ from the defaults\n"
    lines = [
        f"{row.name} = {json.dumps(public(_plain_data(row.value)), ensure_ascii=False)}"
        for row in setting_rows(config)
        if not row.is_default and row.name.startswith(tuple(f"{table}." for table in SHOWN))
        if row.name not in LABELS
    ]
    yield "```toml\n" + "\n".join(lines) + "\n```\n"


def _plain_data(value: Any) -> Any:
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value


def _versions() -> Iterator[str]:
    yield "## Versions\n"
    found = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    listed = ", ".join(f"{name} {version}" for name, version in found.items())
    yield f"When this card was made: {listed}.\n"


def _use(name: str) -> Iterator[str]:
    yield "## Use\n"
    yield (
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"model = AutoModelForCausalLM.from_pretrained({name!r})\n"
        f"tokenizer = AutoTokenizer.from_pretrained({name!r})\n```\n"
    )


def _cell(text: str) -> str:
    return plain(text).replace("|", "\\|")
