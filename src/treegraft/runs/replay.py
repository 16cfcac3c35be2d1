"""Groups of earlier updates, learned from once more beside fresh ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from statistics import fmean

from treegraft.core.keyed import keyed_unit
from treegraft.core.types import Tree
from treegraft.runs.record import RunFolder
from treegraft.runs.tree_files import parts_in, write_trees
from treegraft.settings.config import Config

CAPACITY = 512
"""Groups that are kept, the latest of each task: some updates of RolloutReplay."""


class Replay:
    """The latest groups of a run that taught something, one for each task.

    Source: RolloutReplay (Sun et al., arXiv 2506.05316): a share σ of an update's tasks is sampled
    anew, the other groups are drawn evenly from a FIFO of whole groups. Departures: an update
    replays as many as there are from the second one on, where the paper's first epoch is all fresh;
    the share of groups whose rewards are equal, which the paper leaves out and its code keeps, is
    left out. The paper's choice of tasks by difficulty (DOTS) is `tasks.sampler.Difficulty`.
    """

    def __init__(self, config: Config, folder: RunFolder | None, update: int) -> None:
        """Takes up the groups of the run's files up to `update`: a resumed run draws what an
        uninterrupted one would have drawn. Without a folder it begins with none."""
        self._folder = folder
        self._settings = config.replay
        self._seed = config.run.seed
        self._num_wanted = self._settings.num_replayed(config.run.tasks_per_update)
        self._drawn: list[int] = []
        self._groups: dict[str, Tree] = {}
        """By task, the oldest first."""
        if self._num_wanted and folder is not None:
            for tree in reversed(list(self._latest(folder, update))):
                self._groups[tree.task.id] = tree

    def _latest(self, folder: RunFolder, update: int) -> Iterator[Tree]:
        """The newest first, as many as are kept."""
        seen: set[str] = set()
        for part in reversed(parts_in(folder.trees_dir, "update")):
            for tree in reversed([*part.trees()] if part.update <= update else []):
                if len(seen) == CAPACITY:
                    return
                if tree.task.id not in seen and _teaches(tree):
                    seen.add(tree.task.id)
                    yield tree

    def labels(self) -> Sequence[str]:
        """Returns the parts that a resume from the present state reads its groups from."""
        if not self._num_wanted or self._folder is None:
            return ()
        oldest = 1
        if len(self._groups) == CAPACITY:
            oldest = min(map(_update_of, self._groups.values()))
        parts = parts_in(self._folder.trees_dir, "update")
        return [part.label for part in parts if part.update >= oldest]

    def save(self, folder: RunFolder) -> None:
        """Writes the groups into a folder from which another one takes them up."""
        for update, trees in groupby(self._groups.values(), _update_of):
            write_trees(folder.trees_path(update), [*trees])

    @property
    def num_due(self) -> int:
        """Groups that the next update replays."""
        return min(self._num_wanted, len(self._groups))

    def mixed(self, update: int, fresh: Sequence[Tree]) -> list[Tree]:
        """Returns an update's groups with those that are replayed, spread evenly among them, so
        that each mini-batch has both."""
        replayed = sorted(
            self._groups.values(),
            key=lambda tree: keyed_unit(self._seed, "replay", update, tree.task.id),
        )[: self.num_due]
        self._drawn = [update - _update_of(tree) for tree in replayed]
        # Each at its share of the way: of 4 fresh and 2 replayed ones the latter are 2nd and 5th.
        placed: list[tuple[float, Tree]] = []
        for trees in (fresh, replayed):
            for index, tree in enumerate(trees):
                placed.append(((index + 0.5) / len(trees), tree))
        placed.sort(key=lambda pair: pair[0])
        return [tree for _, tree in placed]

    def take_fresh(self, update: int, learned: Sequence[Tree]) -> list[Tree]:
        """Returns the groups among those learned from that this update sampled, and keeps them for
        later ones."""
        # Replayed groups have the number of the update that sampled them.
        fresh = [tree for tree in learned if tree.group_id.startswith(f"{update}/")]
        for tree in fresh if self._num_wanted else ():
            if _teaches(tree):
                self._groups.pop(tree.task.id, None)
                self._groups[tree.task.id] = tree
        # The oldest goes first, as in the paper's queue.
        while len(self._groups) > CAPACITY:
            del self._groups[next(iter(self._groups))]
        return fresh

    def take_metrics(self) -> dict[str, float]:
        """Returns the replay/* metrics of the last update; none where nothing is ever replayed."""
        if not self._num_wanted:
            return {}
        ages = self._drawn
        self._drawn = []
        return {
            "replay/num_groups": float(len(ages)),
            "replay/num_kept": float(len(self._groups)),
        } | ({"replay/age_mean": fmean(ages)} if ages else {})


def _update_of(tree: Tree) -> int:
    return int(tree.group_id.partition("/")[0])


def _teaches(tree: Tree) -> bool:
    # An update's file also has the groups that its rounds dropped; only what was learned from has
    # scores of the learner. With a KL term that is every group.
    is_learned = any(step.old_logprobs is not None for step in tree.steps)
    has_advantage = any(leaf.advantage for leaf in tree.leaves if leaf.has_loss)
    return is_learned and (has_advantage or any(step.advantage for step in tree.steps))
