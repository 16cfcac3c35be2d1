"""Shares of a tree's leaves, as defaults of settings."""

from __future__ import annotations

from typing import Any

from treegraft.parts import value_of


def half_the_leaves(config: Any) -> int:
    """Returns half of explore.num_leaves, at least 1."""
    return max(1, int(value_of(config, "explore.num_leaves")) // 2)
