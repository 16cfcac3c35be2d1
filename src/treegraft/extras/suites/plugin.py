"""The command that measures an agent on evaluation sets, and the comparison of two such results."""

from __future__ import annotations

from treegraft.parts import Command, Plugin

_HERE = "treegraft.extras.suites.command"
plugin = Plugin(
    name="suites",
    commands={
        "eval suite": Command(
            path=f"{_HERE}:suite_app", help="Measure an agent on suites of evaluation sets."
        )
    },
    comparisons={"eval.json": f"{_HERE}:compare_suites"},
)
