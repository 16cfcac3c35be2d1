"""The command that measures an agent on evaluation sets, and the comparison of two such results."""

from __future__ import annotations

from treegraft.parts import Registry

_HERE = "treegraft.extras.suites.command"


def register(registry: Registry) -> None:
    """Registers the command that measures an agent on evaluation sets, and a comparison."""
    registry.command(
        "eval suite",
        f"{_HERE}:suite_app",
        help="Measure an agent on suites of evaluation sets.",
    )
    registry.part("comparison", "eval.json", f"{_HERE}:compare_suites")
