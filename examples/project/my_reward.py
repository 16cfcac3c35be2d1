"""A reward beside the built-in one: arguments are lists with one entry for each trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treegraft import Trajectory


def one_call(*, trajectories: Sequence[Trajectory], **columns: Any) -> list[float]:
    """Returns 1.0 where the agent called its tool once; `columns` holds the data's columns."""
    return [float(trajectory.num_tool_calls == 1) for trajectory in trajectories]
