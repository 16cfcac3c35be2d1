"""Lessons without rollouts: stored successes at the tasks of an update, and at earlier ones,
imitated by how much they exceed what the agent earns.

    S ← S/2 + Σ_x mean_i r_{x,i},   N ← N/2 + |X|,   V = S / N          one value for all tasks
    w_z = clip(R_z - V, 0, 1);  of this update's tasks 0 where R_z < mean_i r_{x,i}
    L_lessons = - c / |Z| · Σ_z w_z (1 / n_z) Σ_t log π(z_t | q, z_<t)

X are the tasks of an update, its own leaves included in V; Z is at most one trajectory z for each
of them, and keyed draws from those of earlier tasks. n_z counts z's tokens of its agent, calls and
answer, results being context. |Z| is that of the optimiser step and counts lessons of weight 0.
No call is made and nothing is sampled for a lesson. The method is our own: V is shared since with a
value of each task the lessons of easy tasks fade first, and all that are left say "go on".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from torch import Tensor

from treegraft.core.keyed import keyed_int
from treegraft.core.types import Tree
from treegraft.policy.learn.pack import TreeBatch
from treegraft.policy.learn.plan import split_evenly

DECAY = 0.5
"""What an update leaves of the value's sums."""
Value = tuple[float, float]
"""(S, N): sum of mean rewards, and weight of the tasks they are of."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """A stored success as a tree of one path, with loss on its agent's tokens."""

    tree: Tree
    reward: float
    """Above 0."""

    @property
    def rank(self) -> tuple[float, int]:
        """The better one has the lower rank."""
        return -self.reward, len(self.tree.steps)


@dataclass(frozen=True, slots=True)
class Given:
    """The lessons of an update."""

    trees: list[Tree]
    """Each with its weight as the advantage of its leaf."""
    value: Value
    metrics: dict[str, float]


class LessonBook:
    """Chooses the lessons of each update, a function of seed, number and the trees alone."""

    def __init__(self, *, num_earlier: int, seed: int) -> None:
        """Args:
        num_earlier: keyed draws from earlier tasks' lessons; those drawn twice count once.
        """
        self._num_earlier = num_earlier
        self._seed = seed
        self._stored: dict[str, Lesson] = {}

    @property
    def is_empty(self) -> bool:
        return not self._stored

    def add(self, lesson: Lesson) -> None:
        """Takes a lesson of its task where it is better than the one that is known: by its reward,
        then by how few steps it has."""
        name = lesson.tree.task.id
        known = self._stored.get(name)
        if known is None or lesson.rank < known.rank:
            self._stored[name] = lesson

    def choose(
        self, trees: Sequence[Tree], earlier: Sequence[str], number: int, value: Value
    ) -> Given:
        """Returns the lessons of update `number`, and the value after it.

        Args:
            trees: scored, of this update.
            earlier: tasks of the updates before; they may repeat.
            value: after the update before.
        """
        means = _own_means(trees)
        total = DECAY * value[0] + sum(means.values())
        count = DECAY * value[1] + len(means)
        own = [tree.task.id for tree in trees if tree.task.id in self._stored]
        # Once each: after the first epoch every task comes again.
        known = dict.fromkeys(earlier)
        pool = [name for name in known if name in self._stored and name not in own]
        draws = range(self._num_earlier if pool else 0)
        drawn = {pool[keyed_int(self._seed, "lesson", number, n) % len(pool)] for n in draws}
        mean = total / count if count else 0.0
        # In the pool's order: a set has none that is the same in every process.
        names = [*dict.fromkeys(own), *filter(drawn.__contains__, pool)]
        weights = []
        lessons = []
        for name in names:
            weights.append(self._weight(name, mean, means.get(name)))
            lessons.append(_weighted(self._stored[name].tree, weights[-1]))
        return Given(
            lessons,
            (total, count),
            {
                "lesson/num_lessons": float(len(names)),
                "lesson/num_earlier": float(len(drawn)),
                "lesson/weight_mean": fmean(weights) if weights else 0.0,
                "lesson/value": mean,
            },
        )

    def _weight(self, name: str, value: float, own: float | None) -> float:
        reward = self._stored[name].reward
        # Clipped: rewards above 1 must not outweigh the rollouts.
        return 0.0 if own is not None and reward < own else min(1.0, max(0.0, reward - value))


def _own_means(trees: Sequence[Tree]) -> dict[str, float]:
    """The mean reward of each task's leaves; none for a task whose leaves all failed."""
    means = {}
    for tree in trees:
        if own := [leaf.reward for leaf in tree.leaves if leaf.reward is not None]:
            means[tree.task.id] = fmean(own)
    return means


def _weighted(tree: Tree, weight: float) -> Tree:
    (leaf,) = tree.leaves
    return replace(tree, leaves=(replace(leaf, advantage=weight),))


def weight_of(lesson: Tree) -> float:
    """Returns the weight of a lesson that `LessonBook.choose` gave."""
    return lesson.leaves[0].advantage or 0.0


def shared_out(
    lessons: Sequence[Tree], minibatches: Sequence[tuple[int, ...]]
) -> dict[tuple[int, ...], list[Tree]]:
    """Returns the lessons of each mini-batch with trees, as evenly as it goes."""
    parts = list(filter(None, minibatches))
    shares = split_evenly(len(lessons), max(1, len(parts)))
    found = {}
    for part, own in zip(parts, shares, strict=False):
        found[part] = [lessons[n] for n in own]
    return found


def lessons_loss(batch: TreeBatch, logprobs: Tensor, coef: float, num_lessons: int) -> Tensor:
    """Returns - c / |Z| · Σ_z w_z (1 / n_z) Σ_t log π over the lessons of a pass.

    Args:
        logprobs: [U] of the batch's tokens.
        coef: c.
        num_lessons: |Z|, of the whole optimiser step.
    """
    rows = batch.carries_loss.nonzero()[:, 0]
    weights = batch.lengths.new_tensor([path.leaf.advantage or 0.0 for path in batch.paths])
    factors = (coef / num_lessons * weights / batch.lengths.clamp(min=1.0)).float()
    chosen = logprobs.index_select(0, batch.tokens[rows])
    return -(factors[batch.trajectories[rows]] * chosen).sum()
