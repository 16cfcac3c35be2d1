"""Settings of TextWorld, and what it brings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from treegraft.parts import Contradiction, Registry, Settings, setting


class TextWorldSettings(Settings):
    levels: list[Annotated[int, Field(ge=1, le=20)]] = setting([1, 3, 5, 7], min_length=1)
    """Levels of Treasure Hunter, in equal shares. 1 to 10 have 5 rooms and quests of 1 to 5
    commands, 11 to 20 have 10 rooms with doors and containers and quests of 2 to 10. To draw a
    world of 5 rooms takes 25 to 200 ms. The package's levels of 20 rooms take seconds."""


def _wrong(config: Any) -> Iterator[Contradiction]:
    if config.tasks.kind == "textworld" and not config.environment.kind:
        yield Contradiction(
            ("environment.kind", "tasks.kind"),
            "environment.kind: got none, but tasks of kind 'textworld' are played in an"
            ' environment; expected environment.kind = "textworld".',
        )


_HERE = "treegraft.extras.environments.textworld"


def register(registry: Registry) -> None:
    """Registers TextWorld's environments and tasks."""
    registry.environment("textworld", f"{_HERE}.environment:textworld_environments")
    registry.tasks(
        "textworld",
        f"{_HERE}.tasks:textworld_tasks",
        generated=True,
        table=TextWorldSettings,
        checks=(_wrong,),
    )
