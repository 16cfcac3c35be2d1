"""Parts of work on stored trajectories: buffers and their files, what the agent would have written,
and an agent that judges it."""

from __future__ import annotations

from typing import Any

from treegraft.assemble import Parts as Parts
from treegraft.core.demonstration import Written as Written
from treegraft.core.demonstration import plain_step as plain_step
from treegraft.core.sessions import SessionOpener as SessionOpener
from treegraft.core.types import ROOT_ID as ROOT_ID
from treegraft.runs.display import display_on as display_on
from treegraft.runs.open import open_checkpoint as open_checkpoint
from treegraft.settings.config import Config
from treegraft.tools.environments.rehearsal import rehearse_all as rehearse_all
from treegraft.traces.collect import attempts_tree as attempts_tree
from treegraft.traces.keys import read_trajectory as read_trajectory
from treegraft.traces.keys import split_steps as split_steps
from treegraft.traces.keys import value_text as value_text
from treegraft.traces.rollout_buffer import buffer_file as buffer_file
from treegraft.traces.store import Place as Place
from treegraft.traces.store import TraceFile as TraceFile
from treegraft.traces.store import content_from_json as content_from_json


def scores_of(model: Any, config: Config) -> tuple[Any, int | None]:
    """Returns the `Likelihood` of trees under a model, and the longest path that the model reads;
    None for any."""
    from treegraft.policy.learn.likelihood import Likelihood
    from treegraft.policy.output_head import max_context

    return Likelihood(model, config.learn), max_context(model)
