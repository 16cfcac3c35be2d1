"""Trees of given sizes for measurements of the learner, and the same trajectories apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.speed.update import Shape, example_trees, leaf_weights
from treegraft.core.types import Tree


@dataclass(frozen=True, slots=True)
class Workload:
    """One tree of `num_unique` tokens whose tokens are shared `ratio` times in the mean."""

    shape: Shape

    @classmethod
    def of(cls, num_unique: int, ratio: float, leaves: int = 8) -> Workload:
        """Returns a tree of one prompt and leaves of one length each: with a prompt of x leaves,
        leaves · (1 + x) / (leaves + x) = ratio."""
        prompt = leaves * (ratio - 1.0) / (leaves - ratio)
        tokens = int(num_unique / (leaves + prompt))
        return cls(Shape(1, num_unique - leaves * tokens, leaves, tokens))

    def trees(self, text: Sequence[int]) -> list[Tree]:
        """Returns the tree, its leaves with advantages of both signs."""
        return [_credited(tree, self.shape.leaves) for tree in example_trees(self.shape, text)]

    def apart(self, text: Sequence[int]) -> list[Tree]:
        """Returns each trajectory as a tree of its own: rows without padding."""
        found = []
        for tree in self.trees(text):
            for number, path in enumerate(tree.trajectories()):
                steps = (path.steps[0], replace(path.steps[1], id="0.0"))
                leaf = replace(path.leaf, step_id="0.0")
                found.append(
                    replace(tree, group_id=f"{tree.group_id}/{number}", steps=steps, leaves=(leaf,))
                )
        return found


def _credited(tree: Tree, count: int) -> Tree:
    advantages = leaf_weights(count).tolist()
    leaves = (
        replace(leaf, advantage=advantage, weight=1.0 / count)
        for leaf, advantage in zip(tree.leaves, advantages, strict=True)
    )
    return replace(tree, leaves=tuple(leaves))
