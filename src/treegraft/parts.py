"""What people who write extensions, or loops of their own, build on.

Together with `treegraft` itself this is all that is promised to them; other modules may move.
Examples for each name: docs/parts.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treegraft.core.lazy import homes, loader

if TYPE_CHECKING:
    from treegraft.algo import losses, objectives
    from treegraft.assemble import assemble_engine
    from treegraft.cli import commands
    from treegraft.cli.doctor import Machine
    from treegraft.core import (
        addresses,
        chat_client,
        errors,
        files,
        interfaces,
        interrupt,
        keyed,
        listener,
        packages,
        spans,
    )
    from treegraft.core.finding import Finding
    from treegraft.core.plugin import (
        Command,
        ExplorerFacts,
        ExplorerKind,
        OutcomeKind,
        PlacementKind,
        Plugin,
        TrackerKind,
    )
    from treegraft.core.text import plain
    from treegraft.core.types import (
        Below,
        Branch,
        BranchCause,
        Completion,
        Expand,
        GraftCause,
        Leaf,
        Observation,
        PathView,
        RestartCause,
        Retry,
        RetryCause,
        Sampling,
        Start,
        Stored,
        StoredCause,
        ToolCall,
    )
    from treegraft.core.workers import WorkerPool
    from treegraft.evals import measuring
    from treegraft.explore.entropy import EntropyBranching
    from treegraft.explore.independent import Independent
    from treegraft.launch.grove import Grove, grove
    from treegraft.policy.engine import served
    from treegraft.policy.learn.learner import Learner
    from treegraft.policy.learn.rows import LeafRow, leaf_rows
    from treegraft.policy.shapes import ModelShape
    from treegraft.runs import metrics
    from treegraft.runs.display import NoDisplay
    from treegraft.runs.tracked import Tracked
    from treegraft.settings import recipe
    from treegraft.settings.load import setting_rows
    from treegraft.settings.table import Contradiction, Settings, has, setting, value_of, when
    from treegraft.settings.tools import EnvironmentSettings
    from treegraft.tasks import fields, readers
    from treegraft.tasks.open import OpenTasks
    from treegraft.tasks.sampler import Epochs
    from treegraft.tools.environments.own import ClassEnvironments, EnvironmentTool
    from treegraft.tools.own_thread import run_in_thread
    from treegraft.tools.search.encoders import build_encoder
    from treegraft.tools.search.lexical import best_texts
    from treegraft.tools.search.tool import open_corpus
    from treegraft.traces import judging, remote
    from treegraft.traces.fill import BufferBuild
    from treegraft.view.bundle import standalone_page
    from treegraft.view.runs import RunReader
    from treegraft.view.trained import Trained

__all__ = [
    "Below",
    "Branch",
    "BranchCause",
    "BufferBuild",
    "ClassEnvironments",
    "Command",
    "Completion",
    "Contradiction",
    "EntropyBranching",
    "EnvironmentSettings",
    "EnvironmentTool",
    "Epochs",
    "Expand",
    "ExplorerFacts",
    "ExplorerKind",
    "Finding",
    "GraftCause",
    "Grove",
    "Independent",
    "Leaf",
    "LeafRow",
    "Learner",
    "Machine",
    "ModelShape",
    "NoDisplay",
    "Observation",
    "OpenTasks",
    "OutcomeKind",
    "PathView",
    "PlacementKind",
    "Plugin",
    "RestartCause",
    "Retry",
    "RetryCause",
    "RunReader",
    "Sampling",
    "Settings",
    "Start",
    "Stored",
    "StoredCause",
    "ToolCall",
    "Tracked",
    "TrackerKind",
    "Trained",
    "WorkerPool",
    "addresses",
    "assemble_engine",
    "best_texts",
    "build_encoder",
    "chat_client",
    "commands",
    "errors",
    "fields",
    "files",
    "grove",
    "has",
    "interfaces",
    "interrupt",
    "judging",
    "keyed",
    "leaf_rows",
    "listener",
    "losses",
    "measuring",
    "metrics",
    "objectives",
    "open_corpus",
    "packages",
    "plain",
    "readers",
    "recipe",
    "remote",
    "run_in_thread",
    "served",
    "setting",
    "setting_rows",
    "spans",
    "standalone_page",
    "value_of",
    "when",
]

_HOMES = homes(
    {
        "algo": "losses objectives",
        "assemble": "assemble_engine",
        "cli": "commands",
        "cli.doctor": "Machine",
        "core": (
            "addresses chat_client errors files interfaces interrupt keyed listener packages spans"
        ),
        "core.finding": "Finding",
        "core.plugin": (
            "Command ExplorerFacts ExplorerKind OutcomeKind PlacementKind Plugin TrackerKind"
        ),
        "core.text": "plain",
        "core.types": (
            "Below Branch BranchCause Completion Expand GraftCause Leaf Observation PathView "
            "RestartCause Retry RetryCause Sampling Start Stored StoredCause ToolCall"
        ),
        "core.workers": "WorkerPool",
        "evals": "measuring",
        "explore.entropy": "EntropyBranching",
        "explore.independent": "Independent",
        "launch.grove": "Grove grove",
        "policy.engine": "served",
        "policy.learn.learner": "Learner",
        "policy.learn.rows": "LeafRow leaf_rows",
        "policy.shapes": "ModelShape",
        "runs": "metrics",
        "runs.display": "NoDisplay",
        "runs.tracked": "Tracked",
        "settings": "recipe",
        "settings.load": "setting_rows",
        "settings.table": "Contradiction Settings has setting value_of when",
        "settings.tools": "EnvironmentSettings",
        "tasks": "fields readers",
        "tasks.open": "OpenTasks",
        "tasks.sampler": "Epochs",
        "tools.environments.own": "ClassEnvironments EnvironmentTool",
        "tools.own_thread": "run_in_thread",
        "tools.search.encoders": "build_encoder",
        "tools.search.lexical": "best_texts",
        "tools.search.tool": "open_corpus",
        "traces": "judging remote",
        "traces.fill": "BufferBuild",
        "view.bundle": "standalone_page",
        "view.runs": "RunReader",
        "view.trained": "Trained",
    }
)
__getattr__ = loader("treegraft.parts", _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
