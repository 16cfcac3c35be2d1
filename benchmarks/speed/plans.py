"""Trees laid down beforehand: how long each step is, how long its tool takes, and where branches
stand."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

Complete = Callable[[Sequence[int], int, tuple[int | str, ...]], Awaitable[Sequence[int]]]
"""From a prefix, a number of tokens and a key to the tokens sampled."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: so many sampled tokens, then a tool that takes its time, and its result's
    tokens."""

    num_tokens: int
    wait_s: float = 0.0
    result_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PathPlan:
    """The steps of a start, or of a branch from where it stands."""

    steps: tuple[StepPlan, ...]
    branches: tuple[tuple[int, PathPlan], ...] = ()
    """(steps of this path done, branch): it opens beside the next step, as soon as the result is
    there."""

    @property
    def num_leaves(self) -> int:
        return 1 + sum(branch.num_leaves for _, branch in self.branches)

    @property
    def num_sampled(self) -> int:
        return sum(step.num_tokens for step in self.steps) + sum(
            branch.num_sampled for _, branch in self.branches
        )

    @property
    def num_tokens(self) -> int:
        """Sampled and of results."""
        own = sum(step.num_tokens + len(step.result_ids) for step in self.steps)
        return own + sum(branch.num_tokens for _, branch in self.branches)

    def paths(self) -> list[tuple[StepPlan, ...]]:
        """Returns the steps of each leaf, from the root."""
        found = [self.steps]
        for place, branch in self.branches:
            found += [(*self.steps[:place], *rest) for rest in branch.paths()]
        return found


@dataclass(frozen=True, slots=True)
class TreePlan:
    """A tree under one prompt."""

    starts: tuple[PathPlan, ...]

    @property
    def num_leaves(self) -> int:
        return sum(start.num_leaves for start in self.starts)

    @property
    def num_steps(self) -> int:
        """Of the longest path."""
        return max(len(path) for start in self.starts for path in start.paths())

    @property
    def num_sampled(self) -> int:
        return sum(start.num_sampled for start in self.starts)

    @property
    def num_tokens(self) -> int:
        """After the prompt, each once."""
        return sum(start.num_tokens for start in self.starts)

    def apart(self) -> TreePlan:
        """Returns the same leaves, each a start of its own."""
        return TreePlan(tuple(PathPlan(path) for start in self.starts for path in start.paths()))


def arpo_tree(
    *,
    num_starts: int = 8,
    num_leaves: int = 16,
    num_steps: int = 3,
    tokens: tuple[int, int] = (32, 96),
    result: tuple[int, int] = (20, 60),
    wait_s: tuple[float, float] = (0.05, 0.5),
    seed: int = 0,
) -> TreePlan:
    """Returns a tree whose starts have a branch each while leaves are left, after the first result
    and the second in turn."""
    draw = random.Random(f"tree {seed}")

    def steps(first: int) -> tuple[StepPlan, ...]:
        return tuple(step(number) for number in range(first, num_steps))

    def step(number: int) -> StepPlan:
        count = draw.randint(*tokens)
        if number == num_steps - 1:
            return StepPlan(count)
        ids = tuple(draw.randrange(10, 60) for _ in range(draw.randint(*result)))
        return StepPlan(count, draw.uniform(*wait_s), ids)

    if num_steps == 1:  # nowhere to branch
        num_starts = num_leaves
    starts = []
    for number in range(num_starts):
        own = steps(0)
        places = [
            1 + n % (num_steps - 1) for n in range(number, num_leaves - num_starts, num_starts)
        ]
        starts.append(PathPlan(own, tuple((place, PathPlan(steps(place))) for place in places)))
    return TreePlan(tuple(starts))


@dataclass(slots=True)
class _Growth:
    """A tree under way."""

    complete: Complete
    num_sampled: int = 0
    group: asyncio.TaskGroup = field(default_factory=asyncio.TaskGroup)

    async def walk(self, prefix: list[int], path: PathPlan, key: tuple[int | str, ...]) -> None:
        """Runs a path from its first step to its last; its branches go their own ways."""
        for place, step in enumerate(path.steps):
            for number, (at, branch) in enumerate(path.branches):
                if at == place:
                    self.group.create_task(self.walk(list(prefix), branch, (*key, at, number)))
            sampled = await self.complete(prefix, step.num_tokens, (*key, "step", place))
            self.num_sampled += len(sampled)
            if step.wait_s:
                await asyncio.sleep(step.wait_s)
            prefix = [*prefix, *sampled, *step.result_ids]


async def grow_plan(
    complete: Complete, plan: TreePlan, prompt: Sequence[int], key: tuple[int | str, ...]
) -> int:
    """Grows a tree and returns how many tokens were sampled."""
    growth = _Growth(complete)
    async with growth.group:
        for number, start in enumerate(plan.starts):
            growth.group.create_task(growth.walk(list(prompt), start, (*key, number)))
    return growth.num_sampled
