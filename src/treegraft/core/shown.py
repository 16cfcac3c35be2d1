"""How steps, trees and trajectories show themselves: in one line, in print, in a notebook."""

from __future__ import annotations

import importlib
from typing import Any

ABOVE: dict[str, str] = {}
"""What data and results do by code that stands above them: a name -> "module:name". The package
fills it, so that no arrow points up."""


def above(name: str) -> Any:
    """Returns the object of that name in `ABOVE`."""
    module, _, attribute = ABOVE[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


class ShownStep:
    """A step in one line, without its token ids."""

    __slots__ = ()

    def __repr__(self: Any) -> str:
        size = f"{self.num_tokens} tokens"
        return f"<Step {self.id} by {self.origin.name.lower()}: {size}, {self.content!r:.99}>"


class Drawn:
    """Shows itself in print and in a notebook as the viewer draws it."""

    __slots__ = ()

    def __str__(self) -> str:
        return str(above("text")(self))

    def _repr_html_(self) -> str:
        return str(above("html")(self))


class ShownTree(Drawn):
    """A tree, in one line where it stands in a list."""

    __slots__ = ()

    def __repr__(self: Any) -> str:
        rewards = [leaf.reward for leaf in self.leaves if leaf.reward is not None]
        mean = f", mean reward {sum(rewards) / len(rewards):.3g}" if rewards else ""
        size = f"{len(self.steps)} steps, {len(self.leaves)} leaves"
        return f"<Tree {self.group_id!r:.60} of {self.task.question[:60]!r}: {size}{mean}>"


class ShownTrajectory(Drawn):
    """A trajectory, in one line where it stands in a list."""

    __slots__ = ()

    def __repr__(self: Any) -> str:
        reward = "" if self.reward is None else f", reward {self.reward:.3g}"
        end = f"{len(self.steps) - 1} steps, {self.status}, answer {self.leaf.answer!r:.60}{reward}"
        return f"<Trajectory of {self.task.question[:60]!r}: {end}>"
