"""The commands of studies and reports."""

from __future__ import annotations

from treegraft.parts import Registry

_HERE = "treegraft.extras.lab"


def register(registry: Registry) -> None:
    """Registers the commands of studies and reports."""
    registry.command(
        "report",
        f"{_HERE}.report.command:report",
        help="Write figures of runs, and their numbers as CSV.",
    )
    registry.command(
        "study",
        f"{_HERE}.study.command:study",
        help="Run a study: arms in worlds, in pairs of equal seeds.",
    )
