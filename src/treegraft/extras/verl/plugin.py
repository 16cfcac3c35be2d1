"""The commands that prepare a training inside verl."""

from __future__ import annotations

from treegraft.parts import Command, Plugin

plugin = Plugin(
    name="verl",
    commands={
        "verl-data": Command(
            path="treegraft.extras.verl.command:verl_data",
            help="Write a recipe's tasks as the parquet files that verl reads.",
        ),
        "verl-args": Command(
            path="treegraft.extras.verl.command:verl_args",
            help="Print the arguments of verl that a recipe gives.",
        ),
    },
)
