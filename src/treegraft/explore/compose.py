"""Several explorers on one tree."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from treegraft.core.import_paths import blaming
from treegraft.core.interfaces import Explorer, Restarting
from treegraft.core.types import Branch, Expand, Generate, Graft, PathView, Retry, Start, Tree


class Composed:
    """Asks explorers in order: the first one starts and fills, the first that wants a graft gets
    it, branches add up."""

    def __init__(self, explorers: Sequence[Explorer]) -> None:
        """Takes at least one explorer; where several probe, each sees as many tokens as it asked
        for."""
        self._explorers = tuple(explorers)
        # Those of `fill`, which is the first one's.
        first = explorers[0]
        self.expands = first.expands
        self.retries = first.retries
        self.plans_starts = first.plans_starts
        self.wants_rewards = first.wants_rewards
        self.has_stages = first.has_stages
        if isinstance(first, Restarting):
            self.restarts = first.restarts
        probes = [one.probe_tokens for one in explorers if one.probe_tokens is not None]
        self.probe_tokens: int | None = max(probes, default=None)

    def starts(self, max_leaves: int) -> Start:
        """Returns the first explorer's starts."""
        return self._explorers[0].starts(max_leaves)

    def before_step(self, path: PathView) -> Generate | Graft:
        """Returns the first answer that is not Generate."""
        for explorer in self._explorers:
            if isinstance(decision := explorer.before_step(path), Graft):
                return decision
        return Generate()

    def after_probe(self, path: PathView, probe: Sequence[float]) -> Branch | None:
        """Returns all explorers' branches as one, with the cause of the first that wants any, else
        of the first that looked."""
        wanted = []
        for explorer in self._explorers:
            if explorer.probe_tokens is not None:
                branch = explorer.after_probe(path, probe[: explorer.probe_tokens])
                # Also one of 0 branches: it has the numbers that its rule saw.
                wanted += [branch] if branch is not None else []
        if not wanted:
            return None
        first = next((branch for branch in wanted if branch.num), wanted[0])
        return Branch(sum(branch.num for branch in wanted), first.cause)

    def is_hybrid(self, start: int) -> bool:
        """Returns whether the rollouts of this first-level ordinal may retrieve, by any explorer
        that says so."""
        return any(explorer.is_hybrid(start) for explorer in self._explorers)

    def fill(self, tree: Tree, max_leaves: int) -> Start | Sequence[Expand | Retry]:
        """Returns what the first explorer opens in the end."""
        return self._explorers[0].fill(tree, max_leaves)


def asking(explorer: Explorer, method: str, task_id: str = "") -> AbstractContextManager[None]:
    """Returns a block that asks a method of an explorer, at a task where there is one; what this
    raises becomes a `SettingError` that names them."""
    parts = explorer._explorers if isinstance(explorer, Composed) else (explorer,)
    names = " + ".join(type(one).__name__ for one in parts)
    place = f" in {method}, at task '{task_id}'" if task_id else f" in {method}"
    return blaming(names, "explore.explorers", place)
