"""Settings of the warnings while training: the limit at which each warning is given."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import PlainValidator

from treegraft.settings.explore import with_arpo, with_graft
from treegraft.settings.table import Settings, setting, when


def _limit(value: Any, most: float, expected: str) -> float | Literal["off"]:
    # One validator for the whole union: of pydantic's message for each member only one is shown.
    if value == "off":
        return "off"
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most:
        return float(value)
    raise ValueError(expected)


def _share(value: Any) -> float | Literal["off"]:
    return _limit(value, 1.0, "a share, 0 to 1, or 'off'")


def _amount(value: Any) -> float | Literal["off"]:
    return _limit(value, 1e300, "a number from 0 on, or 'off'")


Share = Annotated[float | Literal["off"], PlainValidator(_share)]
Amount = Annotated[float | Literal["off"], PlainValidator(_amount)]


class HealthSettings(Settings):
    """Limits of the warnings; "off" silences one. Their meanings and remedies stand in
    `treegraft.runs.health`."""

    window: int = setting(3, ge=1)
    """Updates that no_tool_calls, branch_unused, graft_unused and graft_untrue look back on;
    they are silent before, but for branch_unused and graft_unused if there is no branch or graft at
    all."""
    no_tool_calls: Amount = 0.0
    """Mean tool calls of a trajectory, in the window, up to which the agent counts as calling
    none."""
    no_variance: Share = 1.0
    """Share of groups without variance of reward from which on to warn."""
    entropy_collapse: Share = 0.05
    """Share of the first update's entropy down to which it counts as collapsed."""
    truncated: Share = 0.25
    """Share of trajectories out of tokens, steps or calls from which on to warn."""
    violated: Share = 0.5
    """Share of trajectories that broke the format from which on to warn."""
    failed: Share = 0.0
    """Share of trajectories lost to failures of ours above which to warn."""
    branch_unused: Share = setting(0.95, idle_unless=with_arpo)
    """Share of the leaves meant for branches that became fresh starts, mean of the window, from
    which on to warn."""
    graft_unused: Share = setting(0.95, idle_unless=with_graft)
    """Share of the trajectories that may retrieve and hold no graft, mean of the window, from which
    on to warn."""
    graft_untrue: Share = setting(0.5, idle_unless=(with_graft, when("environment.kind")))
    """Share of the retrievals whose steps the environment contradicts, mean of the window, from
    which on to warn."""
    answer_copied: Share = setting(0.1, idle_unless=with_graft)
    """Share of the trajectories with a graft that took their answer from another agent's words from
    which on to warn."""
    held_out_differs: Share = 0.5
    """Difference of rollout/accuracy and held-out accuracy from which on to warn."""
    engine_drift: Amount = 1.0
    """Factor on learn/engine_gap_limit above which to warn; three breaches of the limit itself end
    the run all the same."""
    tool_broken: Share = 0.5
    """Share of a tool's calls that failed from which on to warn."""
    not_finite: Amount = 0.0
    """Number of metrics that are no finite numbers above which to warn."""
