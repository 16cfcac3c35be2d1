"""The limits of one trajectory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from treegraft.core.types import NO_FILTERS, Filters
from treegraft.settings.config import Config

MIN_ROOM = 16
"""Fewest tokens that a rollout must have left behind what it did not sample itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one trajectory, and how many leaves its tree has."""

    num_leaves: int
    """Leaves of a tree."""
    temperature: float
    """0 is greedy."""
    filters: Filters = NO_FILTERS
    """In evaluations alone: the log-probabilities of training have to be those of the policy."""
    max_completion_tokens: int
    """After the prompt, tool results included."""
    max_agent_steps: int
    max_tool_calls: int
    deadline_s: float
    """Of the whole trajectory."""


def training_limits(config: Config) -> Limits:
    """Returns the limits of a trajectory in training."""
    rollout = config.rollout
    return Limits(
        num_leaves=config.explore.num_leaves,
        temperature=rollout.temperature,
        max_completion_tokens=rollout.max_completion_tokens,
        max_agent_steps=rollout.max_agent_steps,
        max_tool_calls=rollout.max_tool_calls,
        deadline_s=rollout.deadline_s,
    )


def eval_limits(config: Config, *, temperature: float, num_leaves: int) -> Limits:
    """Returns the limits of a trajectory in an evaluation, which samples as its own table says."""
    limits, own = training_limits(config), config.eval
    filters = Filters(repetition_penalty=own.repetition_penalty)
    # The most likely token stays whatever else is left out.
    if temperature > 0:
        filters = replace(filters, top_k=own.top_k, top_p=own.top_p, min_p=own.min_p)
    names = ("max_completion_tokens", "max_agent_steps", "max_tool_calls")
    given = {name: value for name in names if (value := getattr(own, name)) is not None}
    return replace(limits, num_leaves=num_leaves, temperature=temperature, filters=filters, **given)
