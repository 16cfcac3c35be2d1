"""Treegraft trains language-model agents that use tools, with reinforcement learning on trees of
steps."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from treegraft.core.lazy import homes, loader
from treegraft.core.moved import find_moved
from treegraft.core.shown import ABOVE

if TYPE_CHECKING:
    from treegraft.algo.arpo import branch_probability, entropy_change, shared_advantages
    from treegraft.algo.groups import group_advantages
    from treegraft.algo.rapo import combined_advantages, retrieval_reward, shaping_factor
    from treegraft.core.errors import (
        DataError,
        SettingError,
        ToolError,
        ToolUnavailable,
        TreegraftError,
    )
    from treegraft.core.types import (
        Origin,
        Status,
        Step,
        StepContent,
        Task,
        Trace,
        Trajectory,
        Tree,
    )
    from treegraft.evals.agent import answer_question
    from treegraft.evals.evaluate import evaluate_checkpoint
    from treegraft.policy.engine.scripted import ScriptedEngine
    from treegraft.policy.learn.pack import TreeBatch, pack_trees
    from treegraft.policy.learn.scores import token_scores
    from treegraft.runs.record import read_trees
    from treegraft.runs.result import RunResult
    from treegraft.runs.trust import trust
    from treegraft.settings.config import Config
    from treegraft.settings.load import load_config
    from treegraft.tasks.scoring import exact_match, f1, math_equal
    from treegraft.traces.buffer import TraceBuffer
    from treegraft.train import sft, train

__version__ = "0.8.0.dev0"

__all__ = [
    "Config",
    "DataError",
    "Origin",
    "RunResult",
    "ScriptedEngine",
    "SettingError",
    "Status",
    "Step",
    "StepContent",
    "Task",
    "ToolError",
    "ToolUnavailable",
    "Trace",
    "TraceBuffer",
    "Trajectory",
    "Tree",
    "TreeBatch",
    "TreegraftError",
    "__version__",
    "answer_question",
    "branch_probability",
    "combined_advantages",
    "entropy_change",
    "evaluate_checkpoint",
    "exact_match",
    "f1",
    "group_advantages",
    "load_config",
    "math_equal",
    "pack_trees",
    "read_trees",
    "retrieval_reward",
    "sft",
    "shaping_factor",
    "shared_advantages",
    "token_scores",
    "train",
    "trust",
]

_NAMES = {
    "algo.groups": "group_advantages",
    "algo.arpo": "branch_probability entropy_change shared_advantages",
    "algo.rapo": "combined_advantages retrieval_reward shaping_factor",
    "core.errors": "DataError SettingError ToolError ToolUnavailable TreegraftError",
    "core.types": "Origin Status Step StepContent Task Trace Trajectory Tree",
    "evals.agent": "answer_question",
    "evals.evaluate": "evaluate_checkpoint",
    "policy.engine.scripted": "ScriptedEngine",
    "policy.learn.scores": "token_scores",
    "policy.learn.pack": "TreeBatch pack_trees",
    "runs.record": "read_trees",
    "runs.result": "RunResult",
    "runs.trust": "trust",
    "settings.config": "Config",
    "settings.load": "load_config",
    "tasks.scoring": "exact_match f1 math_equal",
    "traces.buffer": "TraceBuffer",
    "train": "sft train",
}
_HOMES = homes(_NAMES)
"""The module of each public name, loaded on first use: importing treegraft does not import
torch."""


class _Package(ModuleType):
    """A package whose attribute `train` is the function, also once its module is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system binds each submodule to its name in the package.
        if name in _HOMES and isinstance(value, ModuleType):
            return
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
find_moved()
ABOVE.update(
    {
        "text": "treegraft.view.drawn:as_text",
        "html": "treegraft.view.drawn:as_html",
        "agent": "treegraft.evals.agent:Agent",
        "viewer": "treegraft.view.inline:Viewer",
    }
)


__getattr__ = loader("treegraft", _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
