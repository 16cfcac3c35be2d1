"""The processes that run a training together, as its parts know them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from treegraft.core.types import Tree


class Team(Protocol):
    """The processes that run the same loop. Rank 0 samples, records and writes, and the others get
    from it what they need."""

    rank: int
    size: int

    def gather(self, values: Any) -> list[Any]:
        """Returns each rank's values, tensors [any length] of one type on the CPU, in the order of
        ranks."""

    def share(self, value: Any = None) -> Any:
        """Returns rank 0's value, which JSON can hold, on every rank, however long it takes to
        come.

        Raises:
            Interrupted: rank 0 stops here to save (on the other ranks).
            RankError: a rank has ended.
        """

    def share_trees(self, trees: Sequence[Tree] = ()) -> list[Tree]:
        """Returns rank 0's trees on every rank."""

    def call_off(self) -> None:
        """Lets the others, who wait for something shared, stop in order to save with rank 0."""

    def finish(self) -> None:
        """Notes that the work has come to its end."""


class Alone:
    """One process by itself."""

    rank = 0
    size = 1

    def gather(self, values: Any) -> list[Any]:
        """Returns the values."""
        return [values.cpu()]

    def share(self, value: Any = None) -> Any:
        """Returns the value."""
        return value

    def share_trees(self, trees: Sequence[Tree] = ()) -> list[Tree]:
        """Returns the trees."""
        return list(trees)

    def call_off(self) -> None:
        """Does nothing."""

    def finish(self) -> None:
        """Does nothing."""
