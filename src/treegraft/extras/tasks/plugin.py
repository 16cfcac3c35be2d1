"""Settings of reasoning-gym's tasks, and what brings them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from treegraft.parts import Plugin, Settings, setting, when


class ReasoningGymSettings(Settings):
    generator: str = setting("chain_sum", acts="imports")
    """Name of a reasoning-gym generator, e.g. "chain_sum", "products", "basic_arithmetic"."""
    params: dict[str, Any] = setting({}, acts="imports")
    """The generator's own parameters."""


class _Tables(Settings):
    arithmetic: ReasoningGymSettings = setting(
        ReasoningGymSettings(), idle_unless=when("tasks.kind", "arithmetic")
    )


def _needs(config: Any) -> Iterator[tuple[str, str]]:
    if config.tasks.kind == "arithmetic":
        yield "tasks.kind = 'arithmetic'", "reasoning_gym"


plugin = Plugin(
    name="reasoning_gym",
    tasks={"arithmetic": "treegraft.extras.tasks.arithmetic:arithmetic_tasks"},
    generated=("arithmetic",),
    toolless=("arithmetic",),
    needs=_needs,
    settings={"tasks": _Tables},
)
