"""The commands of studies, reports and pruned buffers."""

from __future__ import annotations

from treegraft.parts import Registry

_HERE = "treegraft.extras.lab"


def register(registry: Registry) -> None:
    """Registers the commands of studies, reports and pruned buffers."""
    registry.command(
        "report",
        f"{_HERE}.report_command:report",
        help="Write a report of runs: report.html and figures/.",
    )
    registry.command(
        "study",
        f"{_HERE}.study_command:study",
        help="Run a study: arms in worlds, in pairs of equal seeds.",
    )
    registry.command(
        "buffer prune",
        f"{_HERE}.pruning.command:prune_app",
        help="Write a buffer without the steps that did not help the steps after them.",
    )
    registry.command(
        "buffer show",
        f"{_HERE}.pruning.command:show",
        help="Print stored trajectories, and a pruned buffer's cut steps and weights of steps.",
    )
