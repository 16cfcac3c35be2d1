"""The work of `treegraft buffer build`: from a recipe to traces in a file."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Unpack

from treegraft.assemble import Parts
from treegraft.core.given import giving
from treegraft.core.interfaces import Display, TaskSource
from treegraft.core.interrupt import Ended, run_to_end
from treegraft.core.registry import registered
from treegraft.settings.config import Config
from treegraft.settings.objects import Objects, with_objects
from treegraft.tasks.build import build_tasks
from treegraft.tasks.rewards import check_rewards
from treegraft.traces.agents import Agent, ScriptedAgent
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
                # Servers may cost money.
                tokens = f"{report.num_read:,} tokens read and {report.num_written:,} written"
                details.append(tokens)
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
        """Holds the agent with the parts of the recipe, which need no engine."""
        # No prompt mentions retrieval.
        explore = self._config.explore.model_copy(update={"explorers": ["independent"]})
        config = self._config.model_copy(update={"explore": explore})
        async with Parts.build(config, needs="prompts", source=tasks) as parts:
            check_rewards(parts.rewards, parts.train_tasks)
            yield ScoredAgent(agent=self._agent(parts), format=parts.format, scorer=parts.scorer)

    def _agent(self, parts: Parts) -> Agent:
        if self.settings.agent == "expert":
            return ScriptedAgent(
                parts.source,
                seed=parts.config.run.seed,
                source=self.settings.source or "expert",
                environments=parts.environments,
            )
        # The client of servers is an extension.
        agent: Agent = registered("agent")["server"].load()(parts)
        return agent
