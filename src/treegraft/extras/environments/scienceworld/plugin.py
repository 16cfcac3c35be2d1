"""Settings of ScienceWorld, and what it brings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from treegraft.parts import Contradiction, Registry, Settings, setting

Simplification = Literal[
    "easy",
    "teleportAction",
    "selfWateringFlowerPots",
    "openContainers",
    "openDoors",
    "noElectricalAction",
]


class ScienceWorldSettings(Settings):
    games: list[str] = setting(
        [
            "lifespan-longest-lived",
            "lifespan-shortest-lived",
            "lifespan-longest-lived-then-shortest-lived",
            "find-non-living-thing",
        ],
        min_length=1,
        acts="nothing",
    )
    """Names of ScienceWorld's 30 tasks, in equal shares, such as "find-plant" or "boil"; those that
    stand here are the shortest."""
    simplifications: list[Simplification] = ["easy"]
    """What is made easier in each world; "easy" is all of it, empty is nothing."""
    held_out: Literal["dev", "test"] = "dev"
    """The package's variations that are evaluated on; it is trained on the package's train ones."""
    num_warmup: int = setting(16, ge=1)
    """Train variations of each game that are kept for the demonstrations of the warm-up, at most
    half of them. The gold path of each takes the package some 0.3 s."""
    max_actions: int = setting(30, ge=1)
    """Actions after which a world is over."""


def _wrong(config: Any) -> Iterator[Contradiction]:
    if config.tasks.kind == "scienceworld" and not config.environment.kind:
        yield Contradiction(
            ("environment.kind", "tasks.kind"),
            "environment.kind: got none, but tasks of kind 'scienceworld' are played in an"
            ' environment; expected environment.kind = "scienceworld".',
        )


_HERE = "treegraft.extras.environments.scienceworld"


def register(registry: Registry) -> None:
    """Registers ScienceWorld's environments and tasks."""
    registry.environment("scienceworld", f"{_HERE}.environment:scienceworld_environments")
    registry.tasks(
        "scienceworld",
        f"{_HERE}.tasks:scienceworld_tasks",
        table=ScienceWorldSettings,
        checks=(_wrong,),
    )
