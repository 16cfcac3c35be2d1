"""The passes of an update: which parts of which trees are in each, and who makes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from treegraft.core.columns import Column
from treegraft.core.team import Team
from treegraft.core.types import Step, Tree
from treegraft.policy.deal import deal
from treegraft.policy.learn.pack import in_packed_order, num_tree_tokens, plan_packs, split_tree


class Part(NamedTuple):
    """A tree, or some of its leaves with the steps above them."""

    owner: int
    """Index of the whole tree in its update."""
    tree: Tree


Pack = tuple[Part, ...]
"""The parts of one forward and backward pass."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The passes of one optimiser step or measurement, a function of the trees alone."""

    packs: tuple[Pack, ...]
    ranks: tuple[int, ...]
    """The rank that makes each."""

    def own(self, rank: int) -> list[Pack]:
        """Returns the packs of a rank, and an empty one for each pass that only others make."""
        own = [pack for pack, maker in zip(self.packs, self.ranks, strict=True) if maker == rank]
        most = max((self.ranks.count(maker) for maker in set(self.ranks)), default=0)
        # Every rank makes as many passes: weights that are divided are gathered for each.
        return own + [()] * (most - len(own))


def plan_passes(
    trees: Sequence[Tree],
    indices: Sequence[int],
    limit: int,
    num_ranks: int,
    *,
    takes_imitated: bool = False,
) -> Plan:
    """Returns the passes of the chosen trees, each of at most `limit` tokens; trees that are too
    large are split."""
    parts = []
    sizes = []
    for n in indices:
        for part in split_tree(trees[n], limit, with_imitated=takes_imitated):
            parts.append(Part(n, part))
            sizes.append(num_tree_tokens(part, with_imitated=takes_imitated))
    packs = []
    costs = []
    for group in plan_packs(sizes, limit):
        packs.append(tuple(parts[n] for n in group))
        costs.append(sum(sizes[n] for n in group))
    return Plan(tuple(packs), deal(costs, num_ranks))


def gathered(team: Team, plan: Plan, own: Sequence[Tensor]) -> list[Tensor]:
    """Returns, for each pack of the plan, its values of sampled tokens, float32 on the CPU.

    Args:
        own: those of the packs that this process has made, in their order.
    """
    # A rank without a pass has nothing to join.
    none = torch.zeros(0, dtype=torch.float32)
    flat = torch.cat([values.detach().float().cpu() for values in (*own, none)])
    columns = team.gather(flat)
    places = [0] * len(columns)
    found = []
    for pack, rank in zip(plan.packs, plan.ranks, strict=True):
        count = sum(step.num_sampled for part in pack for step in part.tree.steps)
        found.append(columns[rank][places[rank] : places[rank] + count])
        places[rank] += count
    return found


def by_step(plan: Plan, columns: Sequence[Tensor]) -> Iterator[tuple[int, Step, list[float]]]:
    """Yields (index of the tree, step, its sampled tokens' values) from the values of each pack."""
    for pack, column in zip(plan.packs, columns, strict=True):
        values = column.tolist()
        place = 0
        for owner, tree in pack:
            for step in in_packed_order(tree.steps):
                count = step.num_sampled
                yield owner, step, values[place : place + count]
                place += count


def spread(step: Step, values: Sequence[float], filler: float) -> Column:
    """Returns one value per token of the step, `filler` where it was not sampled."""
    column = np.full(step.num_tokens, filler)
    column[step.sampled_mask] = values
    return column


def exchanged(trees: Sequence[Tree], steps: Iterable[tuple[int, Step]]) -> list[Tree]:
    """Returns the trees with some of their steps exchanged, by the index of the tree."""
    found: dict[int, dict[str, Step]] = {}
    for n, step in steps:
        found.setdefault(n, {})[step.id] = step
    return [with_steps(tree, found.get(n, {})) for n, tree in enumerate(trees)]


def with_steps(tree: Tree, steps: Mapping[str, Step]) -> Tree:
    """Returns the tree with some of its steps exchanged, by id."""
    if not steps:
        return tree
    return replace(tree, steps=tuple(steps.get(step.id, step) for step in tree.steps))


def combined(team: Team, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
    """Returns `combine` of each rank's value, which JSON can hold."""
    if team.size == 1:
        return combine([value])
    # JSON, since nothing that another process sends may run code.
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    return combine([json.loads(bytes(one.tolist())) for one in team.gather(text)])


def split_evenly(count: int, parts: int) -> list[tuple[int, ...]]:
    """Returns 0..count-1 cut into `parts` runs whose lengths differ by at most one; short of items,
    some are empty."""
    found = []
    start = 0
    for n in range(1, parts + 1):
        end = count * n // parts
        found.append(tuple(range(start, end)))
        start = end
    return found
