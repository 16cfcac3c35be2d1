"""What an update samples: trees of the tasks that the sampler deals, and of further tasks in place
of groups that teach nothing (dynamic sampling)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence

from treegraft.core.interfaces import TaskSampler
from treegraft.core.types import Task, Tree
from treegraft.explore.independent import rewards_vary
from treegraft.rollout.loop import Grower
from treegraft.settings.config import Config


class Trees(list[Tree]):
    """The trees of an update that are learned from, and the others that it sampled."""

    def __init__(
        self,
        kept: Iterable[Tree] = (),
        *,
        dropped: Sequence[Tree] = (),
        references: Sequence[Tree] = (),
        num_drawn: int = 0,
    ) -> None:
        """Args:
        kept: those to learn from.
        dropped: those without variance of reward, and those that came on top of the number wanted;
            they are recorded and counted like the rest.
        references: those that only tell the sampler of tasks how hard tasks are.
        num_drawn: tasks drawn for them.
        """
        super().__init__(kept)
        self.dropped = list(dropped)
        self.references = list(references)
        self.num_drawn = num_drawn

    @property
    def sampled(self) -> list[Tree]:
        """All but the references."""
        return [*self, *self.dropped]

    @property
    def recorded(self) -> list[Tree]:
        """All of them."""
        return [*self.sampled, *self.references]

    @property
    def metrics(self) -> dict[str, float]:
        """rollout/num_dropped_groups, if the sampler chose the tasks."""
        if not self.num_drawn:
            return {}
        return {"rollout/num_dropped_groups": float(len(self.dropped))}

    def changed(self, kept: Iterable[Tree], dropped: Sequence[Tree] | None = None) -> Trees:
        """Returns the same with other trees to learn from; None: the same dropped ones."""
        return Trees(
            kept,
            dropped=self.dropped if dropped is None else dropped,
            references=self.references,
            num_drawn=self.num_drawn,
        )

    @classmethod
    def of(cls, trees: Sequence[Tree]) -> Trees:
        """Returns trees as they are, or those of a plain list."""
        return trees if isinstance(trees, Trees) else cls(trees)


async def sample_rounds(
    draw: Callable[[int, set[str]], Sequence[Task]],
    grow: Callable[[Sequence[Task]], Awaitable[list[Tree]]],
    *,
    size: int,
    max_rounds: int,
    penalty: float = 0.0,
) -> Trees:
    """Returns `size` trees whose rewards vary, or as many as were found in `max_rounds` rounds of
    `size` tasks; where none was found, the first ones, which teach nothing.

    Source: DAPO's dynamic sampling (Yu et al., arXiv 2503.14476, sec. 3.2). With one round all
    trees are kept, and groups without variance are left out by the learner alone. Departures: when
    the rounds are over the update goes on with what there is, where DAPO stops with an error; the
    first trees by the order of their tasks count, not the first that are done.

    Args:
        draw: returns the tasks after so many drawn ones, without those of the ids.
        grow: returns a scored tree for each task.
        penalty: weight of the reward "overlong", see `independent.rewards_vary`.
    """
    kept: list[Tree] = []
    every: list[Tree] = []
    num_drawn = 0
    while num_drawn < max_rounds * size and len(kept) < size:
        tasks = draw(num_drawn, {tree.task.id for tree in every})
        if not tasks and num_drawn:  # every task of a small set has been drawn
            break
        trees = await grow(tasks)
        every += trees
        # By the number wanted, not found, so that a resume draws the same tasks.
        num_drawn += size
        wanted = [tree for tree in trees if max_rounds == 1 or rewards_vary(tree, penalty=penalty)]
        kept += wanted[: size - len(kept)]
    kept = kept or every[:size]
    names = {tree.group_id for tree in kept}
    dropped = [tree for tree in every if tree.group_id not in names]
    return Trees(kept, dropped=dropped, num_drawn=num_drawn)


async def sample_update(
    config: Config,
    sampler: TaskSampler,
    grower: Grower,
    number: int,
    first: int,
    *,
    size: int,
    num_at_once: int,
    on_progress: Callable[[int, int], None],
) -> Trees:
    """Returns the trees of update `number`, and those of the sampler's references for it.

    Args:
        first: tasks drawn by the updates before.
        size: tasks to sample.
        num_at_once: trees whose leaves the engine completes at the same time.
        on_progress: called with (number of trees done, number of tasks) as trees end.
    """

    def grow(tasks: Sequence[Task], purpose: str, group_prefix: str) -> Awaitable[list[Tree]]:
        return grower.grow_all(
            tasks,
            noise_key=(config.run.seed, purpose, number),
            group_prefix=group_prefix,
            max_live_trees=min(config.rollout.max_live_trees, num_at_once),
            on_tree=lambda done, _: on_progress(done, len(tasks)),
        )

    references: list[Tree] = []
    if wanted := sampler.references(number):
        # Noise of their own: a task that is dealt because its rollouts earned what was wanted shall
        # not have the same ones again.
        references = await grow(wanted, "reference", f"{number}/reference")
        sampler.label(number, references)
    sampled = await sample_rounds(
        lambda drawn, without: sampler.draw(number, first + drawn, size=size, without=without),
        lambda tasks: grow(tasks, "train", str(number)),
        size=size,
        max_rounds=config.rollout.max_rounds,
        penalty=config.reward.penalty,
    )
    sampled.references = references
    return sampled
