"""Treegraft trains language-model agents that use tools, with reinforcement learning on trees of
steps."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treegraft.evals.evaluate import answer_question, evaluate_checkpoint
    from treegraft.runs.record import read_trees
    from treegraft.settings.config import Config
    from treegraft.settings.load import load_config
    from treegraft.train import RunResult

__version__ = "0.6.0"

__all__ = [
    "Config",
    "RunResult",
    "__version__",
    "answer_question",
    "evaluate_checkpoint",
    "load_config",
    "read_trees",
]

_HOMES = {
    "Config": "treegraft.settings.config",
    "RunResult": "treegraft.train",
    "answer_question": "treegraft.evals.evaluate",
    "evaluate_checkpoint": "treegraft.evals.evaluate",
    "load_config": "treegraft.settings.load",
    "read_trees": "treegraft.runs.record",
}
"""Where each public name lives; loaded on first use, so that importing treegraft does not import
torch. `train` is missing because it would hide the module of its name: `from treegraft.train import
train`."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'treegraft' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
