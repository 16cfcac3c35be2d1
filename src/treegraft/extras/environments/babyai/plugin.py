"""Settings of BabyAI, and what it brings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from treegraft.parts import Contradiction, Registry, Settings, setting


class BabyAISettings(Settings):
    levels: list[str] = setting(
        ["GoToObjS6", "GoToRedBallGrey", "GoToLocalS6N3", "PickupLoc"],
        min_length=1,
        acts="nothing",
    )
    """Names of BabyAI's levels, in equal shares, such as "GoToLocalS6N3" for "BabyAI-GoToLocalS6N3"
    in its newest version."""


def _wrong(config: Any) -> Iterator[Contradiction]:
    if config.tasks.kind == "babyai" and not config.environment.kind:
        yield Contradiction(
            ("environment.kind", "tasks.kind"),
            "environment.kind: got none, but tasks of kind 'babyai' are played in an environment;"
            ' expected environment.kind = "babyai".',
        )


_HERE = "treegraft.extras.environments.babyai"


def register(registry: Registry) -> None:
    """Registers BabyAI's environments and tasks."""
    registry.environment("babyai", f"{_HERE}.environment:babyai_environments")
    registry.tasks(
        "babyai",
        f"{_HERE}.tasks:babyai_tasks",
        generated=True,
        table=BabyAISettings,
        checks=(_wrong,),
    )
