"""Parts of work on stored trajectories: buffers and their files, what the agent would have written,
and an agent that judges it."""

from __future__ import annotations

from treegraft.assemble import Parts
from treegraft.core.demonstration import Written, plain_step
from treegraft.core.sessions import SessionOpener
from treegraft.core.types import ROOT_ID
from treegraft.runs.display import display_on
from treegraft.runs.open import open_checkpoint
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
    "split_steps",
    "value_text",
]
