"""The commands that prepare a training inside verl."""

from __future__ import annotations

from treegraft.parts import Registry


def register(registry: Registry) -> None:
    """Registers the commands that prepare a training inside verl."""
    registry.command(
        "verl-data",
        "treegraft.extras.verl.command:verl_data",
        help="Write a recipe's tasks as the parquet files that verl reads.",
    )
    registry.command(
        "verl-args",
        "treegraft.extras.verl.command:verl_args",
        help="Print the arguments of verl that a recipe gives.",
    )
