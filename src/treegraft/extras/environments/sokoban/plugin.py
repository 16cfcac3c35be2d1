"""Settings of Sokoban, and what it brings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from treegraft.parts import Contradiction, Registry, Settings, setting


class SokobanSettings(Settings):
    size: int = setting(5, ge=3, le=9)
    """Rows and columns of a board, without a frame."""
    num_boxes: int = setting(1, ge=1, le=3)
    """Boxes, and as many goals. The time to search a board grows with the states: some 3 ms with
    one box on 5 x 5 squares, 40 ms with two."""
    num_walls: int = setting(3, ge=0, le=30)
    """Squares that hold a wall."""
    moves: list[Annotated[int, Field(ge=1, le=60)]] = setting([2, 3, 4, 5, 6, 7, 8], min_length=1)
    """Lengths of the shortest solution, in moves, in equal shares."""
    detour_prob: float = setting(0.0, ge=0, lt=1, retrieval_source=True)
    """How often the scripted expert walks to a neighbouring square and back before a move, in
    training boards alone."""
    error_prob: float = setting(0.0, ge=0, lt=1, retrieval_source=True)
    """How often the scripted expert makes another move than a shortest one, in training boards
    alone; it goes on from there, and gives up on a board that it has lost."""


def _wrong(config: Any) -> Iterator[Contradiction]:
    if config.tasks.kind != "sokoban":
        return
    if not config.environment.kind:
        yield Contradiction(
            ("environment.kind", "tasks.kind"),
            "environment.kind: got none, but tasks of kind 'sokoban' are played in an environment;"
            ' expected environment.kind = "sokoban".',
        )
    own = config.tasks.sokoban
    # Goals, boxes elsewhere, and the player.
    if own.num_walls + 2 * own.num_boxes + 1 > own.size**2:
        yield Contradiction(
            ("tasks.sokoban.num_walls", "tasks.sokoban.num_boxes", "tasks.sokoban.size"),
            f"tasks.sokoban.num_walls: got {own.num_walls}, which with {own.num_boxes} boxes and"
            f" goals and a player do not fit on {own.size} x {own.size} squares.",
        )


_HERE = "treegraft.extras.environments.sokoban"


def register(registry: Registry) -> None:
    """Registers Sokoban's environments and tasks."""
    registry.environment("sokoban", f"{_HERE}.environment:sokoban_environments")
    registry.tasks(
        "sokoban",
        f"{_HERE}.tasks:sokoban_tasks",
        generated=True,
        table=SokobanSettings,
        checks=(_wrong,),
    )
