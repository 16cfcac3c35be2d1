"""Filling the Step-Trace Buffer: an agent answers each task N times, and the K best trajectories
are kept as traces.

Source: RAPO (arXiv 2603.03078, sec. 4.1 and app. C.3): N = 16, K = 5, best by outcome reward.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import compress

from treegraft.core.demonstration import Written, tree_of_paths
from treegraft.core.errors import DataError, EngineError, first_cause
from treegraft.core.interfaces import Format, TreeScorer
from treegraft.core.keyed import keyed_int
from treegraft.core.text import plain
from treegraft.core.types import Origin, StepContent, Task, Trace, Tree
from treegraft.settings.explore import BuildSettings
from treegraft.traces.agents import Agent, Attempt
from treegraft.traces.buffer import TraceBuffer
from treegraft.traces.keys import says_something, split_steps

OUTAGES = 32
"""Attempts in a row that could not reach the agent, or ended at a refused reply, after which the
build ends."""


@dataclass(slots=True)
class StoredCounts:
    """Counts of trajectories and traces on their way into a buffer."""

    num_too_low: int = 0
    """Trajectories whose reward was not above the minimum."""
    num_surplus: int = 0
    """Good trajectories that were not among the best of their task."""
    num_new: int = 0
    """Traces that the buffer did not have."""
    num_duplicates: int = 0
    """Traces that it had already."""

    def store(self, buffer: TraceBuffer, traces: Sequence[Trace]) -> None:
        """Adds traces; in one transaction as long as they are no more than the buffer's CHUNK."""
        # Without traces the encoder is not needed, and need not be loaded.
        num_new = buffer.add(traces) if traces else 0
        self.num_new += num_new
        self.num_duplicates += len(traces) - num_new


@dataclass(slots=True)
class BuildReport(StoredCounts):
    """Counts of a build so far; earlier contents of the buffer are left out."""

    num_tasks: int = 0
    """Tasks that were answered."""
    num_skipped: int = 0
    """Tasks that an earlier build had done."""
    num_attempts: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    """Attempts without an answer or a reward, by reason."""
    num_kept: int = 0
    """Trajectories whose steps went into the buffer."""
    reward_sum: float = 0.0
    num_scored: int = 0
    num_calls: int = 0
    """Tool calls of all attempts, stored or not."""
    num_requests: int = 0
    """Replies of a server."""
    num_read: int = 0
    """Tokens of the requests, as the server counts them; 0 where it does not."""
    num_written: int = 0
    """Tokens of the replies."""
    cpu_s: float = 0.0
    """CPU seconds of all threads of this process since the first attempt."""

    @property
    def mean_reward(self) -> float | None:
        """Over all scored attempts, stored or not; None before the first."""
        return self.reward_sum / self.num_scored if self.num_scored else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredAgent:
    """An agent with the format and the scorer of its answers.

    ScoredAgent(agent=ScriptedAgent(tasks, seed=0), format=format, scorer=scorer)
    """

    agent: Agent
    format: Format
    scorer: TreeScorer
    """Gives the rewards, as in training; each attempt is a path of one tree."""


@dataclass(slots=True, kw_only=True)
class _Builder:
    """The work on one task."""

    of: ScoredAgent
    settings: BuildSettings
    seed: int
    report: BuildReport
    gate: asyncio.Semaphore
    num_in_vain: int = 0
    """Attempts in a row without a reply that could be used."""

    async def attempts(self, task: Task) -> tuple[list[Attempt], Tree | None]:
        """Returns all attempts at the task, and those that ended in an answer as a scored tree of
        separate paths; None where there are none."""

        async def attempt(sample: int) -> Attempt:
            async with self.gate:
                return await self.of.agent.solve(task, sample)

        # Training would refuse the task too; one such row must not end the whole build.
        unfit = [Attempt(error="the task's prompt is too long, or holds a special token")]
        try:
            self.of.format.prompt_ids(task)
        except DataError:
            return unfit * self.settings.num_samples, None
        made = list(await asyncio.gather(*map(attempt, range(self.settings.num_samples))))
        answered = [one for one in made if one.error is None]
        # Nothing to score, and a tree needs a leaf.
        if not answered:
            return made, None
        contents = [one.contents for one in answered]
        rewards = [one.environment_reward for one in answered]
        # All samples of a task begin alike in its environment.
        if answered[0].question is not None:
            task = task.asking(answered[0].question)
        try:
            tree = attempts_tree(self.of.format, task, contents, rewards)
        except DataError:
            return unfit * self.settings.num_samples, None
        return made, await self.of.scorer(tree)

    def count(self, attempts: Sequence[Attempt]) -> None:
        """Counts the attempts at a task. Raises EngineError once OUTAGES attempts in a row did not
        reach the agent, or ended at a refused reply."""
        report = self.report
        report.num_attempts += len(attempts)
        for attempt in attempts:
            report.num_calls += sum(len(step.calls) for step in attempt.contents)
            report.num_requests += attempt.num_requests
            report.num_read += attempt.num_tokens[0]
            report.num_written += attempt.num_tokens[1]
            if attempt.error is not None:
                report.failures[attempt.error] += 1
            is_in_vain = attempt.is_outage or attempt.refused is not None
            # In a row: one reply proves that the agent is there.
            self.num_in_vain = self.num_in_vain + 1 if is_in_vain else 0
            if self.num_in_vain >= OUTAGES:
                last = ": ".join(filter(None, (attempt.error, plain(attempt.refused or "", 200))))
                raise EngineError(
                    f"agent '{self.of.agent.source}' was not reached, or replied with neither a"
                    f" call nor an answer, {self.num_in_vain} times in a row; the last:"
                    f" {last}. Earlier traces are kept. Mend the cause, name a model that"
                    " calls tools, or explain the task in format.system_prompt; the same command"
                    " goes on.",
                    code="agent-out-of-reach",
                )

    def best(
        self, task: Task, attempts: Sequence[Attempt], tree: Tree | None
    ) -> list[tuple[int, Attempt, float]]:
        """Returns (sample, attempt, reward) of the trajectories to keep, the best first; the seed
        orders ties."""
        report = self.report
        good: list[tuple[int, Attempt, float]] = []
        leaves = iter(tree.leaves if tree else ())
        for sample, attempt in enumerate(attempts):
            # The tree has a leaf for each attempt that ended in an answer, in their order.
            if attempt.error is not None:
                continue
            leaf = next(leaves)
            if leaf.reward is None:
                report.failures[f"no reward: {leaf.error or 'the scorer gave none'}"] += 1
                continue
            report.num_scored += 1
            report.reward_sum += leaf.reward
            if leaf.reward > self.settings.min_reward:
                good.append((sample, attempt, leaf.reward))
            else:
                report.num_too_low += 1
        # By the seed, not by number: early samples are no better than late ones.
        good.sort(key=lambda item: (-item[2], keyed_int(self.seed, "tie", task.id, item[0])))
        kept = good[: self.settings.num_best]
        report.num_kept += len(kept)
        report.num_surplus += len(good) - len(kept)
        return kept

    def traces(self, task: Task, kept: Sequence[tuple[int, Attempt, float]]) -> list[Trace]:
        """Returns the steps of the kept trajectories that have any text."""
        traces: list[Trace] = []
        for sample, attempt, reward in kept:
            split = split_steps(
                task.id,
                task.question if attempt.question is None else attempt.question,
                attempt.contents,
                reward=reward,
                source=self.of.agent.source,
                trajectory=str(sample),
            )
            said = map(says_something, attempt.contents)
            traces += compress(split, said)
        return traces


async def build_traces(
    tasks: Sequence[Task],
    agent: ScoredAgent,
    settings: BuildSettings,
    buffer: TraceBuffer,
    *,
    seed: int = 0,
    report: BuildReport | None = None,
    on_progress: Callable[[int, int, BuildReport], None] | None = None,
) -> BuildReport:
    """Fills the buffer and returns the counts. Each task is added as a whole, in the order of the
    tasks, so a build that is stopped at any moment loses only the tasks under way; the next one
    skips the tasks of which the buffer has traces of this agent.

    Args:
        settings: those of the agent itself (its kind, server and temperature) were used when it was
            made.
        seed: breaks ties between trajectories of equal reward.
        report: filled in as the work goes on, so that it is there after a Ctrl-C; None makes one.
        on_progress: called with (tasks done, tasks in all, report) before the first and after each
            task.

    Raises:
        EngineError: OUTAGES attempts in a row were in vain. Earlier traces are in the buffer.
    """
    report = BuildReport() if report is None else report
    gate = asyncio.Semaphore(settings.max_concurrent)
    builder = _Builder(of=agent, settings=settings, seed=seed, report=report, gate=gate)
    began = time.process_time()
    # Before the done ones are left out, so that a second build adds none.
    tasks = tasks[: settings.num_tasks]
    done = {one.task_id for one in buffer if one.source == agent.agent.source}
    todo = [task for task in tasks if task.id not in done]
    report.num_skipped += len(tasks) - len(todo)
    # No more than keep the agent busy: what is under way is lost when the build is stopped.
    at_once = 1 + settings.max_concurrent // settings.num_samples
    if on_progress is not None:
        on_progress(0, len(todo), report)
    for first in range(0, len(todo), at_once):
        some = todo[first : first + at_once]
        with first_cause():
            async with asyncio.TaskGroup() as group:
                works = [group.create_task(builder.attempts(task)) for task in some]
        for task, work in zip(some, works, strict=True):
            attempts, tree = work.result()
            builder.count(attempts)
            report.store(buffer, builder.traces(task, builder.best(task, attempts, tree)))
            report.num_tasks += 1
            report.cpu_s = time.process_time() - began
            if on_progress is not None:
                on_progress(report.num_tasks, len(todo), report)
            # A build that is stopped ends here.
            await asyncio.sleep(0)
    return report


def attempts_tree(
    format: Format,
    task: Task,
    attempts: Sequence[Sequence[StepContent]],
    rewards: Sequence[float | None] | None = None,
) -> Tree:
    """Returns trajectories as the separate paths of one tree, completed and not yet scored, in
    their order.

    A step's tokens are what the policy would have written, or, where this format cannot say the
    step, its graft.

    Args:
        rewards: of each one's environment; None without environments.

    Raises:
        DataError: a prompt that cannot be made.
    """

    def written(content: StepContent) -> Written:
        try:
            return Written(content, format.render_step(content))
        except ValueError:
            # Another agent's step may hold two calls, say, where this format has one.
            return Written(content, [(format.render_graft([content]), Origin.POLICY)])

    paths = [[written(content) for content in contents] for contents in attempts]
    return tree_of_paths(
        task, f"buffer/{task.id}", format.prompt_ids(task), paths, rewards, format.answer_of
    )
