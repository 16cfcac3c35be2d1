"""The command that inspects data sets."""

from __future__ import annotations

from treegraft.parts import Registry


def register(registry: Registry) -> None:
    """Registers the command that inspects data sets."""
    registry.command(
        "data", "treegraft.extras.data.command:data_app", help="Inspect data before using it."
    )
