"""Growing trees: the only place that starts asyncio tasks, owns deadlines, and turns failures into data.

All leaves of all trees run at once. A slow tool holds up its own trajectory, nothing else; no tree waits for another.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from treegraft.errors import EngineError
from treegraft.explore.budget import Budget
from treegraft.interfaces import Engine, Explorer, Format, NoiseKey, TreeScorer
from treegraft.rollout.tree import OpenPath, OpenTree, result_of
from treegraft.tools.toolbox import Toolbox
from treegraft.types import Completion, Sampling, Status, StopReason, Task, Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one trajectory may use."""

    num_leaves: int
    """Leaves of a tree."""
    temperature: float
    """0 is greedy."""
    max_completion_tokens: int
    """After the prompt, tool results included."""
    max_agent_steps: int
    max_tool_calls: int
    deadline_s: float
    """Of the whole trajectory."""


@dataclass(slots=True)
class Watch:
    """What is being waited for right now, by owner: {"engine": 40, "tool python": 2}."""

    waits: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def waiting(self, owner: str) -> Iterator[None]:
        """Counts one wait for the time of the block."""
        self.waits[owner] += 1
        try:
            yield
        finally:
            self.waits[owner] -= 1

    def __str__(self) -> str:
        return ", ".join(f"{count} on {owner}" for owner, count in sorted(self.waits.items()) if count) or "nothing"


class Grower:
    """Grows trees of tasks with one engine, format, toolbox and explorer."""

    def __init__(
        self, engine: Engine, format: Format, toolbox: Toolbox, explorer: Explorer, limits: Limits, scorer: TreeScorer
    ) -> None:
        self._engine = engine
        self._format = format
        self._toolbox = toolbox
        self._explorer = explorer
        self._limits = limits
        self._scorer = scorer
        self.watch = Watch()

    async def grow_all(
        self,
        tasks: Sequence[Task],
        *,
        noise_key: NoiseKey,
        group_prefix: str,
        max_live_trees: int,
        on_tree: Callable[[int, Tree], None] | None = None,
    ) -> list[Tree]:
        """Returns one scored tree per task, in the order of the tasks.

        Args:
            noise_key: (seed, purpose, update); task ids and step ids are appended to it.
            group_prefix: goes before the task id in `group_id`.
            max_live_trees: trees that grow at once; more would only wait for rows of the engine.
            on_tree: called with (number of trees done, tree) as each one ends.

        Raises:
            EngineError: every trajectory of every tree failed for a reason of ours.
        """
        gate = asyncio.Semaphore(max_live_trees)
        trees: list[Tree | None] = [None] * len(tasks)
        done = 0

        async def grow(index: int, task: Task) -> None:
            nonlocal done
            async with gate:
                tree = await self.grow(task, noise_key=noise_key, group_id=f"{group_prefix}/{task.id}")
            trees[index] = tree
            done += 1
            if on_tree is not None:
                on_tree(done, tree)

        async with asyncio.TaskGroup() as group:
            for index, task in enumerate(tasks):
                group.create_task(grow(index, task))
        grown = [tree for tree in trees if tree is not None]
        leaves = [leaf for tree in grown for leaf in tree.leaves]
        if leaves and all(leaf.status is Status.FAILED for leaf in leaves):
            raise EngineError(
                f"rollout: all {len(leaves)} trajectories of {len(grown)} trees failed; the first: {leaves[0].error}. "
                "Expected at least one to end by itself; mend the cause and resume."
            )
        return grown

    async def grow(self, task: Task, *, noise_key: NoiseKey, group_id: str) -> Tree:
        """Returns one tree, scored."""
        prompt_ids = self._format.prompt_ids(task)
        budget = Budget(self._limits.num_leaves)
        tree = OpenTree(task, group_id, prompt_ids, budget)
        key = (*noise_key, task.id)
        wanted = self._explorer.starts(budget.max_leaves)
        while granted := budget.grant(wanted):
            async with asyncio.TaskGroup() as group:
                for _ in range(granted):
                    path = tree.open_path()
                    group.create_task(self._grow_path(tree, path, tree.next_id(path.parent), key))
            wanted = self._explorer.fill(tree.close(), budget.max_leaves)
        self._engine.forget(prompt_ids)
        with self.watch.waiting("rewards"):
            return await self._scorer(tree.close())

    async def _grow_path(self, tree: OpenTree, path: OpenPath, step_id: str, key: NoiseKey) -> None:
        """Runs one trajectory to its end; whatever fails in it by our fault becomes a failed leaf."""
        current = [step_id]
        try:
            async with asyncio.timeout(self._limits.deadline_s):
                while await self._grow_step(tree, path, current[0], key):
                    current[0] = tree.next_id(path.parent)
        except TimeoutError as error:
            reason = str(error) or f"no end within rollout.deadline_s = {self._limits.deadline_s} s"
            tree.fail_path(path, current[0], reason, self._engine.policy_version)
        except Exception as error:  # the edge of a rollout: a fault of ours, or of a user's engine, is data on its leaf
            tree.fail_path(path, current[0], f"{type(error).__name__}: {error}", self._engine.policy_version)

    async def _grow_step(self, tree: OpenTree, path: OpenPath, step_id: str, key: NoiseKey) -> bool:
        """Appends one step; returns whether the trajectory goes on."""
        limits = self._limits
        room = limits.max_completion_tokens - path.num_used
        sampling = Sampling(max_new_tokens=room, temperature=limits.temperature, stop=self._format.stop, final=self._format.final)
        with self.watch.waiting("engine"):
            completion = await self._engine.complete(
                path.prefix_ids, sampling, noise_key=(*key, step_id), num_shared=path.num_prompt
            )
        parsed = self._format.parse_step(completion.token_ids)
        content = parsed.content
        status, reason = self._end_of(parsed.violation, content.answer, bool(content.calls), completion, path)
        if status is not None:
            violation = parsed.violation
            if status is Status.FORMAT_VIOLATION and violation is None:
                violation = "ended without a tool call or an answer"
            tree.add_step(step_id, path, completion, limits.temperature, content, stop_reason=reason, violation=violation)
            tree.end_path(path, status, content.answer if status is Status.COMPLETED else None)
            return False
        observations = []
        for call in content.calls:
            with self.watch.waiting(f"tool {call.name}"):
                observations.append(await self._toolbox.call(call, tree.task))
        path.num_tool_calls += len(observations)
        tree.budget.spend(num_tool_calls=len(observations))
        content = result_of(content, observations)
        shown = self._format.observation_ids(observations)
        if len(shown) + len(completion.token_ids) >= room:
            # The result does not fit, so the agent never sees it and it is no part of the path.
            tree.add_step(step_id, path, completion, limits.temperature, content, stop_reason=StopReason.LENGTH)
            tree.end_path(path, Status.TRUNCATED)
            return False
        tree.add_step(step_id, path, completion, limits.temperature, content, observation_ids=shown)
        return True

    def _end_of(
        self, violation: str | None, answer: str | None, has_call: bool, completion: Completion, path: OpenPath
    ) -> tuple[Status | None, StopReason | None]:
        """How a step ends its trajectory (status, and the reason where it is a limit); None where it goes on."""
        if violation is not None:
            return Status.FORMAT_VIOLATION, None
        if answer is not None:
            return Status.COMPLETED, None
        if not has_call:
            return (Status.TRUNCATED if completion.finish is StopReason.LENGTH else Status.FORMAT_VIOLATION), None
        if path.num_tool_calls >= self._limits.max_tool_calls:
            return Status.TRUNCATED, StopReason.TOOL_CALLS
        if path.num_steps + 1 >= self._limits.max_agent_steps:
            return Status.TRUNCATED, StopReason.AGENT_STEPS
        return None, None
