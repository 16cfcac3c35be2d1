"""From settings to the parts of a run: tasks, tokenizer, format, tools, engine, learner."""

from __future__ import annotations

import copy
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self, cast

from treegraft.core.demonstration import Show, Written, tree_of_paths
from treegraft.core.errors import DataError, SettingError, about
from treegraft.core.interfaces import (
    Engine,
    EnvironmentKind,
    Explorer,
    Format,
    Retriever,
    TaskSource,
    Tokenizer,
    Tool,
    TreeScorer,
)
from treegraft.core.interrupt import ctrl_c_ends_at_once
from treegraft.core.sessions import SessionOpener
from treegraft.core.types import Filters, StepContent, Task, Tree
from treegraft.explore.build import build_explorer
from treegraft.policy.engine.build import needs_weights, opened_engine
from treegraft.rollout.agents.grower import AgentGrower
from treegraft.rollout.agents.programs import Program, build_program
from treegraft.rollout.formats.build import build_format
from treegraft.rollout.formats.shipped import use_template
from treegraft.rollout.formats.turns import described_tool
from treegraft.rollout.limits import Limits
from treegraft.rollout.loop import Grower, Placement
from treegraft.settings.config import Config
from treegraft.settings.contradictions import (
    branches,
    check,
    check_context,
    longest_completion,
    refuse,
)
from treegraft.settings.explore import retrieving
from treegraft.tasks.build import build_tasks, closed_vocabulary, distinct
from treegraft.tasks.rewards import WeightedReward, build_rewards, build_scorer, check_rewards
from treegraft.tasks.scoring import require_math
from treegraft.tools.build import build_tools, open_environments
from treegraft.tools.environments.rehearsal import show
from treegraft.tools.environments.sessions import Environments
from treegraft.tools.environments.trial import Trial, try_environment
from treegraft.tools.toolbox import Toolbox

Needs = Literal["prompts", "model", "engine", "learner"]
"""How much of a recipe is made: all that needs no weights; that and the model; that and the engine;
that, the engine and a model to train."""


@dataclass(kw_only=True)
class Parts:
    """The parts of a recipe: all that writes prompts, runs tools and scores, and what samples."""

    config: Config
    source: TaskSource
    tokenizer: Any
    format: Format
    max_prompt: int | None
    """Longest prompt that leaves room for a completion, in tokens; None for no limit."""
    toolbox: Toolbox
    kind: EnvironmentKind | None
    """Of the tasks' environments; None without."""
    rewards: Sequence[WeightedReward]
    scorer: TreeScorer
    load_model: Callable[[], Any]
    """Loads the model of model.path, another one at each call."""
    program: Program | None = None
    """The agent that owns its loop; None for ours."""
    own_engine: Engine | None = None
    """None where none was asked for."""
    placement: Placement | None = None
    """Where engines and growers stand; None for this process."""
    model: Any = None
    """The one to train, with its adapters, or to weigh steps with; None where none was asked for
    and once a learner has it."""

    @classmethod
    @asynccontextmanager
    async def build(
        cls,
        config: Config,
        *,
        needs: Needs = "engine",
        model_path: Path | str | None = None,
        source: TaskSource | None = None,
        engine: Engine | None = None,
        placement: Placement | None = None,
        num_ranks: int = 0,
    ) -> AsyncIterator[Self]:
        """Holds the parts of a recipe.

        Args:
            model_path: load model and tokenizer from here instead of model.path (a checkpoint).
            source: tasks made already; None builds them.
            engine: made already, and closed by its owner; None builds it if it is needed.
            placement: where engines and growers stand; None for this process.
            num_ranks: how many processes learn; 0 for none.

        Raises:
            TreegraftError: a part that cannot be made, before any work starts.
        """
        async with AsyncExitStack() as stack:
            with ctrl_c_ends_at_once():
                if needs == "learner":
                    from treegraft.policy.load import with_gradients

                    stack.enter_context(with_gradients())
                world = _World.of(config, source)
                if placement is not None and world.program is not None:
                    raise SettingError(
                        "agent.run: an agent that owns its loop runs in the process that trains;"
                        " got a cluster. Start the run without one.",
                        settings=["agent.run"],
                        code="agent-on-cluster",
                    )
                loaded = _Loaded.of(world, needs, model_path, engine, placement, num_ranks)
                if engine is None and needs in ("engine", "learner"):
                    opening = loaded.opening(num_ranks, placement, model_path)
                    engine = await stack.enter_async_context(opening)
                parts = cls(
                    **world.prompt_parts(stack, loaded, model_path, engine),
                    own_engine=engine,
                    placement=placement,
                    model=loaded.model if needs in ("model", "learner") else None,
                )
                # Else this frame would keep the model in memory once a learner has taken it.
                del loaded
            yield parts

    @property
    def engine(self) -> Engine:
        """What samples."""
        assert self.own_engine is not None, "these parts were built without an engine"
        return self.own_engine

    @cached_property
    def train_tasks(self) -> Sequence[Task]:
        return distinct(self.source.train_tasks(), "train_tasks")

    @cached_property
    def eval_tasks(self) -> Sequence[Task]:
        return distinct(self.source.eval_tasks(), "eval_tasks")

    async def try_environment(self) -> Trial | None:
        """Begins, copies and rewards an environment on the first task; None where the tasks have
        no environment. Raises `SettingError` for what fails there."""
        tasks = self.train_tasks or self.eval_tasks
        if self.kind is None or not tasks:
            return None
        # Its kind alone matters, not the size of the vocabulary.
        explorers = self.config.explore
        can_branch = branches(build_explorer(explorers, vocab_size=2))
        return await try_environment(
            self.kind,
            self.toolbox,
            tasks[0],
            branches=can_branch or bool(retrieving(explorers.explorers)),
            needs_reward=self.config.reward.funcs == ["environment"],
        )

    async def try_rewards(self, tasks: Sequence[Task]) -> None:
        """Asks the reward functions about made completions of the first of these tasks. Raises
        `SettingError` as `RewardScorer.rehearse` does."""
        for task in tasks[:1]:
            said = [*task.reference[:1], *[task.question] * 3][:3]
            tree = self.answered(task, [StepContent(thought="?", answer=one) for one in said])
            scorer = build_scorer(self.config, self.rewards, self.format.written_text)
            if tree is not None:
                await scorer.rehearse(tree)

    def answered(self, task: Task, answers: Sequence[StepContent]) -> Tree | None:
        """Returns a tree, not scored, with a leaf for each of these answers to a task, as they are
        read back; None where the format cannot say one of them."""
        form = self.format
        try:
            written = [form.render_step(one) for one in answers]
        except ValueError:
            return None
        # As read back, so that a mark which the reference holds counts as it will.
        paths = [[Written(form.parse_step(one[0][0]).content, one)] for one in written]
        return tree_of_paths(
            task, f"check/{task.id}", form.prompt_ids(task), paths, answer_of=form.answer_of
        )

    @property
    def environments(self) -> SessionOpener | None:
        """Opens environments for calls of other agents; None where the tasks have none."""
        return None if self.kind is None else self.toolbox

    @property
    def show(self) -> Show | None:
        """Plays demonstrations in environments and returns them as these show them; None where the
        tasks have none. Raises `DataError` for one that an environment contradicts."""
        return None if self.kind is None else functools.partial(show, self.toolbox)

    @property
    def notes(self) -> Sequence[str]:
        """Remarks on how parts came about that the user should see, one sentence each."""
        return self.format.notes

    def check_tasks(self, tasks: Sequence[Task]) -> None:
        """Refuses tasks that rewards lack columns of, or whose prompt cannot be made.

        Raises:
            SettingError: a reward function with an argument that is no column, or references of
                mathematics without the package that compares it.
            DataError: as `check_prompts` does.
        """
        check_rewards(self.rewards, tasks)
        require_math(one for task in tasks for one in task.reference)
        self.check_prompts(tasks)

    def check_prompts(self, tasks: Sequence[Task]) -> None:
        """Refuses tasks whose prompt cannot be made, all of them at once and before any work.

        Raises:
            DataError: the first such task, and how many there are.
        """
        bad: list[str] = []
        for task in tasks:
            try:
                self.format.prompt_ids(task)
            except DataError as error:
                bad.append(str(error))
        if bad:
            more = f" The same holds for {len(bad)} of {len(tasks)} tasks in all."
            raise DataError(bad[0] + (more if len(bad) > 1 else ""), code="task-invalid")

    def grower(
        self, explorer: Explorer, limits: Limits | None = None, retriever: Retriever | None = None
    ) -> Grower:
        """Returns a grower of trees within `limits`, None for those of training; without a
        retriever nothing is grafted."""
        make: Callable[..., Grower] = Grower
        if self.program is not None:
            room = longest_completion(self.config)[1]
            make = functools.partial(
                AgentGrower,
                program=self.program,
                temperature=self.config.rollout.temperature,
                max_context=None if self.max_prompt is None else self.max_prompt + room,
            )
        elif self.placement is not None:
            make = self.placement.grower
        return make(
            self.engine,
            self.format,
            self.toolbox,
            explorer,
            limits or training_limits(self.config),
            self.scorer,
            retriever=retriever,
        )

    def num_trees_at_once(self, num_leaves: int) -> int:
        """Returns how many trees of so many leaves the engine completes at the same time."""
        return max(1, self.engine.capacity // num_leaves)

    def keep_logs(self, folder: Path) -> None:
        """Moves the logs of an engine that writes any into `folder`, a run folder's own."""
        if self.placement is not None:
            self.placement.show_in(folder.parent)
        elif self.config.engine.kind == "vllm":
            cast(Any, self.engine).move_logs(folder)

    def take_metrics(self) -> dict[str, float]:
        """Returns the metrics of tools and engine since the last call."""
        return self.toolbox.take_metrics() | self.engine.take_metrics()


@asynccontextmanager
async def assemble_engine(
    config: Config, *, model_path: Path | str | None = None
) -> AsyncIterator[Engine]:
    """Opens the engine alone, with the weights of `model_path` or else of model.path.

    Raises:
        TreegraftError: the engine cannot be made.
    """
    # The vocabulary of a tiny model is that of tasks and tools.
    loaded = _Loaded.of(_World.of(config, None), "engine", model_path, None, None, 0)
    async with loaded.opening(0, None, model_path) as engine:
        yield engine


@dataclass(frozen=True, slots=True)
class _World:
    """The parts that need no model: tasks, rewards, environment and tools. Made and checked first,
    so that contradictions are refused before weights are loaded."""

    config: Config
    tasks: TaskSource
    rewards: Sequence[WeightedReward]
    kind: EnvironmentKind | None
    tools: Sequence[Tool]
    program: Program | None

    @classmethod
    def of(cls, config: Config, source: TaskSource | None) -> Self:
        tasks = source or build_tasks(config.tasks, config.run.seed)
        rewards = build_rewards(config.reward, config.rollout.max_completion_tokens)
        kind = open_environments(config.environment)
        own_tools = [*tasks.tools(), *(kind.tools if kind else ())]
        tools = build_tools(config.tools, own_tools)
        # Only its kind matters here; the tokenizer, whose size it takes, comes later.
        explorer = build_explorer(config.explore, vocab_size=2)
        # All contradictions at once, so that a recipe is corrected once.
        refuse(check(config, explorer, tools, kind))
        return cls(config, tasks, rewards, kind, tools, build_program(config.agent.run))

    def load_model(
        self, path: Path | str | None, *, has_weights: bool = True, on_gpu: bool = True
    ) -> tuple[Any, Tokenizer]:
        """Returns (model, tokenizer) of model.path, or of `path` if there is one."""
        from treegraft.policy.load import limit_threads, load_model

        config = self.config
        limit_threads(config.run.num_threads)
        settings = config.model
        if path is not None:
            settings = settings.model_copy(update={"path": str(path)})
        is_tiny = settings.path == "tiny"
        # The tiny model has an embedding for each word of its tasks and for no other.
        words = closed_vocabulary(self.tasks, self.tools, config.warmup) if is_tiny else []
        with about("model.path"):
            return load_model(
                settings,
                vocabulary=words,
                seed=config.run.seed,
                has_weights=has_weights,
                on_gpu=on_gpu,
            )

    def prompt_parts(
        self,
        stack: AsyncExitStack,
        loaded: _Loaded,
        model_path: Path | str | None,
        engine: Engine | None,
    ) -> dict[str, Any]:
        """Returns the fields of `Parts` that need no weights; those that have to be closed go onto
        the stack."""
        from treegraft.policy import output_head

        config = self.config
        tokenizer = loaded.tokenizer
        # The learner packs whole paths, so its model's limit counts beside the engine's.
        own = output_head.max_context(loaded.model)
        of_engine = None if engine is None else engine.max_context
        limits = [limit for limit in (own, of_engine) if limit is not None]
        max_prompt = None
        if limits:
            refuse(check_context(config, min(limits)))
            # A prompt that leaves no room would fail in each of its trajectories.
            max_prompt = min(limits) - longest_completion(config)[1]
        # A checkpoint of ours holds the template already.
        if model_path is None or not (Path(model_path) / "treegraft").is_dir():
            use_template(config.format.chat_template, tokenizer)
        form = build_format(
            config.format,
            tokenizer,
            # An agent's tools come with its requests; the template has to have a place for them.
            self.tools or ([described_tool("a_tool")] if self.program else []),
            # An agent's prompts are its own, and the endpoint measures them.
            max_context=None if self.program else max_prompt,
            end_ids=output_head.end_token_ids(loaded.model, tokenizer.eos_token_id),
            mentions_retrieval="graft" in config.explore.explorers,
        )
        environments = None if self.kind is None else Environments(self.kind, config.environment)
        toolbox = Toolbox(self.tools, config.tools, environments)
        # Services that tools have started end with the parts, whatever failed after them.
        stack.push_async_callback(toolbox.close)
        return {
            "config": config,
            "source": self.tasks,
            "tokenizer": tokenizer,
            "format": form,
            "max_prompt": max_prompt,
            "toolbox": toolbox,
            "kind": self.kind,
            "program": self.program,
            "rewards": self.rewards,
            "load_model": lambda: self.load_model(None)[0],
            "scorer": build_scorer(config, self.rewards, form.written_text),
        }


@dataclass(slots=True)
class _Loaded:
    """A model and its tokenizer, and the engine's own copy."""

    config: Config
    place: Path | str
    """Where they came from."""
    model: Any
    """With its adapters if it is trained; of one that nobody needs, the shape alone."""
    of_engine: Any
    """The engine's own."""
    tokenizer: Any

    @classmethod
    def of(
        cls,
        world: _World,
        needs: Needs,
        model_path: Path | str | None,
        engine: Engine | None,
        placement: Placement | None,
        num_ranks: int,
    ) -> Self:
        config = world.config
        place = model_path or config.model.path
        # Adapters change the model in place, so the engine's copy comes first. Another engine has
        # its own.
        has_copy = config.engine.kind == "native" and placement is None and engine is None
        has_weights = {
            "prompts": False,
            "model": True,
            "engine": engine is None and needs_weights(config, place),
            "learner": True,
        }
        # Several ranks take their rows of it, and a GPU may not hold it whole.
        on_gpu = has_copy or num_ranks < 2
        model, tokenizer = world.load_model(
            model_path, has_weights=has_weights[needs], on_gpu=on_gpu
        )
        if needs != "learner":
            return cls(config, place, model, model, tokenizer)
        own = copy.deepcopy(model).requires_grad_(False) if has_copy else None
        trained = adapted(config, model)
        return cls(config, place, trained, own or trained, tokenizer)

    def opening(
        self, num_ranks: int, placement: Placement | None, model_path: Path | str | None
    ) -> AbstractAsyncContextManager[Engine]:
        """Returns what opens the engine."""
        if placement is not None:
            return placement.engine(self.config, model_path)
        return opened_engine(self.config, self.of_engine, self.tokenizer, self.place, num_ranks)


def adapted(config: Config, model: Any) -> Any:
    """Returns the model with the recipe's adapters. Raises `SettingError` for targets that do not
    fit it."""
    from treegraft.policy.load import with_adapters

    try:
        return with_adapters(model, config.model, seed=config.run.seed)
    except ValueError as error:
        raise SettingError(
            f"model.lora: got targets {config.model.lora.targets!r}, which do not fit the model:"
            f" {error}",
            code="lora-targets-mismatch",
        ) from error


def training_limits(config: Config) -> Limits:
    """Returns the limits of a trajectory in training."""
    rollout = config.rollout
    return Limits(
        num_leaves=config.explore.num_leaves,
        temperature=rollout.temperature,
        max_completion_tokens=rollout.max_completion_tokens,
        max_agent_steps=rollout.max_agent_steps,
        max_tool_calls=rollout.max_tool_calls,
        deadline_s=rollout.deadline_s,
    )


def eval_limits(config: Config, *, temperature: float, num_leaves: int) -> Limits:
    """Returns the limits of a trajectory in an evaluation, which samples as its own table says."""
    limits = training_limits(config)
    own = config.eval
    # Allowed in an evaluation alone: in training the loss needs the plain softmax.
    filters = Filters(repetition_penalty=own.repetition_penalty)
    # The most likely token stays whatever else is left out.
    if temperature > 0:
        filters = replace(filters, top_k=own.top_k, top_p=own.top_p)
    return replace(
        limits,
        num_leaves=num_leaves,
        temperature=temperature,
        filters=filters,
        max_completion_tokens=own.max_completion_tokens or limits.max_completion_tokens,
        # 0 calls is a limit of its own.
        max_tool_calls=(
            limits.max_tool_calls if own.max_tool_calls is None else own.max_tool_calls
        ),
    )
