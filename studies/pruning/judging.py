"""Parts of work on stored trajectories: buffers and their files, what the agent would have written,
and an agent that judges it."""

from __future__ import annotations

from typing import Any

from treegraft.assemble import Parts
from treegraft.core.demonstration import Written, plain_step
from treegraft.core.sessions import SessionOpener
from treegraft.core.types import ROOT_ID
from treegraft.runs.display import display_on
from treegraft.runs.open import open_checkpoint
from treegraft.settings.config import Config
from treegraft.tools.environments.rehearsal import rehearse_all
from treegraft.traces.collect import attempts_tree
from treegraft.traces.keys import read_trajectory, split_steps, value_text
from treegraft.traces.store import Place, TraceFile, content_from_json

__all__ = [
    "ROOT_ID",
    "Parts",
    "Place",
    "SessionOpener",
    "TraceFile",
    "Written",
    "attempts_tree",
    "content_from_json",
    "display_on",
    "open_checkpoint",
    "plain_step",
    "read_trajectory",
    "rehearse_all",
    "scores_of",
    "split_steps",
    "value_text",
]


def scores_of(model: Any, config: Config) -> tuple[Any, int | None]:
    """Returns the `Likelihood` of trees under a model, and the longest path that the model reads;
    None for any."""
    # torch is loaded here: `--help` does not wait for it.
    from studies.pruning.likelihood import Likelihood
    from treegraft.policy.output_head import max_context

    return Likelihood(model, config.learn), max_context(model)
