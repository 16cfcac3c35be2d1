"""The limits of one trajectory."""

from __future__ import annotations

from dataclasses import dataclass

from treegraft.core.types import NO_FILTERS, Filters

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
