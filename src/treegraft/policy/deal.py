"""Work dealt out to processes or threads."""

from __future__ import annotations

from collections.abc import Sequence


def deal(costs: Sequence[float], num_owners: int) -> tuple[int, ...]:
    """Returns the owner of each piece of work: pieces are dealt in order of cost, the most
    expensive first, each to the owner with the least cost so far; ties by number."""
    # Fixed beforehand, not by who is free first: sums over the owners then have one order.
    loads = [0.0] * num_owners
    owners = [0] * len(costs)
    for n in sorted(range(len(costs)), key=lambda n: -costs[n]):
        owners[n] = loads.index(min(loads))
        loads[owners[n]] += costs[n]
    return tuple(owners)
