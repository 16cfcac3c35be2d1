"""A run of a few seconds, for tests of the whole: settings, and what a finished run folder
holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treegraft.parts import Settings
from treegraft.settings.config import tables_and_settings
from treegraft.traces.buffer import TraceBuffer

TINY: Mapping[str, Any] = {
    "run": {"num_updates": 2, "tasks_per_update": 3, "seed": 3, "num_threads": 1},
    "model": {
        "path": "tiny",
        "tiny": {
            "hidden_size": 32,
            "num_layers": 1,
            "num_heads": 2,
            "intermediate_size": 64,
            "max_context": 96,
        },
    },
    "tasks": {
        "kind": "search_world",
        "num_train": 12,
        "num_eval": 4,
        "search_world": {"hops": [1, 2], "num_entities": 8, "num_relations": 5},
    },
    "format": {"system_prompt": "", "require_think": False},
    "reward": {"funcs": ["hierarchical"], "accuracy": "exact_match"},
    "explore": {"num_leaves": 4},
    "rollout": {"max_completion_tokens": 48, "max_agent_steps": 4, "max_tool_calls": 3},
    "eval": {"every": 1, "num_samples": 2},
    "loss": {"clip_low": 0.28, "clip_high": 0.28},
    "learn": {"lr": 3e-3, "num_minibatches": 2},
    "engine": {"max_rows": 16},
    "warmup": {
        "num_steps": 32,
        "batch_size": 4,
        "lr": 1e-2,
        "lr_warmup_steps": 3,
        "decision_frac": 0.5,
        "continue_prob": [0.5],
    },
    "checkpoint": {"every": 1, "keep": 2},
}


def tiny(**tables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings with tables of `tables` merged in: tiny(run={"num_updates": 3})."""

    def merge(base: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
        merged = dict(base)
        for key, value in other.items():
            is_table = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
            merged[key] = merge(merged[key], value) if is_table else value
        return merged

    return merge(TINY, tables)


def write_recipe(path: Path, settings: Mapping[str, Any]) -> Path:
    """Writes settings where the command line reads them."""
    path.write_text(json.dumps(settings), encoding="utf-8")
    return path


def is_timing(key: str) -> bool:
    """Whether a metric lies outside the promises of reproducibility."""
    return key.startswith("time/")


def contents(run_dir: Path) -> dict[str, Any]:
    """Returns everything that two equal runs have in common, by file: metrics less time/*, trees,
    checkpoints."""
    found: dict[str, Any] = {}
    for file in sorted(run_dir.rglob("*")):
        name = file.relative_to(run_dir).as_posix()
        if (
            not file.is_file()
            or file.name == ".lock"
            or "tensorboard" in name
            or name.endswith(("-wal", "-shm", ".index"))
        ):
            continue
        if name.endswith(".sqlite"):
            with TraceBuffer(file, None) as buffer:
                found[name] = [*buffer]
            continue
        if name == "metrics.jsonl":
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            found[name] = [
                {key: value for key, value in line.items() if not is_timing(key)} for line in lines
            ]
        elif (name.endswith("config.json") and "treegraft" in name) or name == "config.json":
            settings = json.loads(file.read_text())
            settings["run"] |= {"name": None, "dir": ""}
            found[name] = settings
        elif name.endswith("treegraft/state.json"):
            state = json.loads(file.read_text())
            # The length of metrics.jsonl and the settings hold times and names.
            del state["metrics_size"], state["checksums"]["treegraft/config.json"]
            state.pop("checksum", None)
            (state.get("beside") or {}).pop("metrics.jsonl", None)
            state["pending"] = {
                key: value for key, value in state["pending"].items() if not is_timing(key)
            }
            found[name] = state
        else:
            found[name] = file.read_bytes()
    return found


def differing(a: Path, b: Path) -> list[str]:
    """Returns the files in which two runs differ."""
    first = contents(a)
    second = contents(b)
    return sorted(
        name for name in first.keys() | second.keys() if first.get(name) != second.get(name)
    )


def table_class(name: str) -> type[Settings]:
    """The class of a table of settings, with those of extensions."""
    table = tables_and_settings()[name].table
    assert table is not None
    return table
