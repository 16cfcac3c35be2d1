"""Settings of reasoning-gym's tasks, and what brings them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from treegraft.parts import Registry, Settings, setting


class ReasoningGymSettings(Settings):
    generator: str = setting("chain_sum", acts="imports")
    """Name of a reasoning-gym generator, e.g. "chain_sum", "products", "basic_arithmetic"."""
    params: dict[str, Any] = setting({}, acts="imports")
    """The generator's own parameters."""


def _needs(config: Any) -> Iterator[tuple[str, str]]:
    if config.tasks.kind == "arithmetic":
        yield "tasks.kind = 'arithmetic'", "reasoning_gym"


def register(registry: Registry) -> None:
    """Registers the tasks of reasoning-gym."""
    registry.tasks(
        "arithmetic",
        "treegraft.extras.tasks.arithmetic:arithmetic_tasks",
        generated=True,
        table=ReasoningGymSettings,
        needs=_needs,
    )
