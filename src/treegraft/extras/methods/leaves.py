"""Shares of a tree's leaves, as defaults of settings, and explorers that use a share first."""

from __future__ import annotations

from typing import Any

from treegraft import Origin, Step
from treegraft.parts import Independent, Start, value_of


def half_the_leaves(config: Any) -> int:
    """Returns half of explore.num_leaves, at least 1."""
    return max(1, int(value_of(config, "explore.num_leaves")) // 2)


def quarter_of_the_leaves(config: Any) -> int:
    """Returns a quarter of explore.num_leaves, at least 1."""
    return max(1, int(value_of(config, "explore.num_leaves")) // 4)


class StartsFirst(Independent):
    """An explorer that begins `num_starts` rollouts at the prompt, and opens siblings of finished
    steps with the leaves that are left."""

    expands = True
    retries = True

    def __init__(self, settings: Any) -> None:
        self._settings = settings

    def starts(self, max_leaves: int) -> Start:
        """Returns the first-level rollouts, at most `max_leaves`."""
        return Start(min(int(self._settings.num_starts), max_leaves))


def is_own(step: Step) -> bool:
    """Returns whether the policy wrote the step, in its format."""
    return step.origin is Origin.POLICY and not step.violation
