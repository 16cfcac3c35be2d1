"""The commands that inspect data sets, and what doctor says of gold traces."""

from __future__ import annotations

from treegraft.parts import Registry


def register(registry: Registry) -> None:
    """Registers the commands of data, and the trial of gold traces."""
    registry.command(
        "data", "treegraft.extras.data.command:data_app", help="Inspect data before using it."
    )
    registry.part("trial", "gold traces", "treegraft.extras.data.replay:replayed")
