"""From settings to the parts of a run: tasks, tokenizer, format, tools, engine, learner."""

from __future__ import annotations

import copy
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from treegraft.core.demonstration import Show, Written, tree_of_paths
from treegraft.core.errors import DataError, SettingError, about
from treegraft.core.interfaces import (
    CreditRule,
    Engine,
    EnvironmentKind,
    Explorer,
    Format,
    LearnerLike,
    Retriever,
    TaskSource,
    Tokenizer,
    TreeScorer,
)
from treegraft.core.interrupt import ctrl_c_ends_at_once
from treegraft.core.sessions import SessionOpener
from treegraft.core.types import Filters, StepContent, Task, Tree
from treegraft.explore.build import build_allocation, build_explorer
from treegraft.policy.engine.build import needs_weights, opened_engine
from treegraft.rollout.formats.build import build_format
from treegraft.rollout.formats.shipped import use_template
from treegraft.rollout.limits import Limits
from treegraft.rollout.loop import Grower
from treegraft.rollout.placement import Placement
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

if TYPE_CHECKING:
    from treegraft.policy.learn.learner import Learner
    from treegraft.policy.learn.ranks import Ranks


@dataclass(kw_only=True)
class Setup:
    """The parts that need no weights: all that writes prompts, runs tools and scores."""

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
        overheads: dict[tuple[str, ...], int] = {}
        for task in tasks:
            try:
                if not self._surely_fits(task, overheads):
                    self.format.prompt_ids(task)
            except DataError as error:
                bad.append(str(error))
        if bad:
            more = f" The same holds for {len(bad)} of {len(tasks)} tasks in all."
            raise DataError(bad[0] + (more if len(bad) > 1 else ""), code="task-invalid")

    def _surely_fits(self, task: Task, overheads: dict[tuple[str, ...], int]) -> bool:
        """Whether a prompt can be made for certain; raises DataError where no text with its roles
        has one.

        Args:
            overheads: tokens of the prompt around the texts, by their roles; filled in here.
        """
        texts = [one["content"] for one in task.messages] or [task.question]
        # A plain letter is a token at most, so short plain questions need no encoding: 10,000 tasks
        # take no time.
        is_plain = all(text and text.isascii() and not set(text) & set("<[|") for text in texts)
        if not is_plain or any("tool_calls" in one for one in task.messages):
            return False
        roles = tuple(one["role"] for one in task.messages)
        if roles not in overheads:
            probe = [{"role": role, "content": "?"} for role in roles]
            overheads[roles] = len(
                self.format.prompt_ids(
                    Task(id=task.id, question="?", reference=(), messages=tuple(probe))
                )
            )
        length = sum(map(len, texts)) + overheads[roles]
        return self.max_prompt is None or length <= self.max_prompt


@dataclass(kw_only=True)
class Parts(Setup):
    """The same with what samples: all that an evaluation needs, with one copy of the model."""

    engine: Engine
    placement: Placement | None = None
    """Where engines and growers stand; None for this process."""

    def grower(
        self, explorer: Explorer, limits: Limits | None = None, retriever: Retriever | None = None
    ) -> Grower:
        """Returns a grower of trees within `limits`, None for those of training; without a
        retriever nothing is grafted."""
        make = Grower if self.placement is None else self.placement.grower
        return make(
            self.engine,
            self.format,
            self.toolbox,
            explorer,
            limits or training_limits(self.config),
            self.scorer,
            retriever=retriever,
            allocate=build_allocation(self.config.explore),
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


@dataclass(kw_only=True)
class TrainingParts(Parts):
    """The same with the parts that learn. The engine has a copy of the model of its own."""

    explorer: Explorer
    learner: LearnerLike
    credit_rule: CreditRule | None


@asynccontextmanager
async def assemble_setup(config: Config) -> AsyncIterator[Setup]:
    """Holds the parts that need no weights; of the model, tokenizer and shape are read.

    Raises:
        TreegraftError: a part that cannot be made.
    """
    async with AsyncExitStack() as stack:
        scenario = _Scenario(config, None)
        model, tokenizer = scenario.load_model(None, has_weights=False)
        yield scenario.setup(stack, model, tokenizer, is_ours=False)


@asynccontextmanager
async def assemble_judge(
    config: Config, model_path: Path | str
) -> AsyncIterator[tuple[Setup, Any]]:
    """Holds the parts that need no weights, and the model of `model_path`, which weighs steps that
    are written already. Raises `TreegraftError` for a part that cannot be made."""
    async with AsyncExitStack() as stack:
        with ctrl_c_ends_at_once():
            scenario = _Scenario(config, None)
            model, tokenizer = scenario.load_model(model_path, has_weights=True)
            is_ours = (Path(model_path) / "treegraft").is_dir()
            setup = scenario.setup(stack, model, tokenizer, is_ours=is_ours)
        yield setup, model


@asynccontextmanager
async def assemble(
    config: Config,
    *,
    model_path: Path | str | None = None,
    source: TaskSource | None = None,
    engine: Engine | None = None,
) -> AsyncIterator[Parts]:
    """Holds the parts of an evaluation; nothing is trained.

    Args:
        model_path: load model and tokenizer from here instead of model.path (a checkpoint).
        source: tasks made already; None builds them.
        engine: made already, and closed by its owner; None builds it.

    Raises:
        TreegraftError: a part that cannot be made, before any work starts.
    """
    async with AsyncExitStack() as stack:
        with ctrl_c_ends_at_once():
            scenario = _Scenario(config, source)
            place = model_path or config.model.path
            has_weights = engine is None and needs_weights(config, place)
            model, tokenizer = scenario.load_model(model_path, has_weights=has_weights)
            if engine is None:
                opening = opened_engine(config, model, tokenizer, place)
                engine = await stack.enter_async_context(opening)
            parts = scenario.parts(stack, model, engine, tokenizer, model_path)
        yield parts


@asynccontextmanager
async def assemble_engine(
    config: Config, *, model_path: Path | str | None = None
) -> AsyncIterator[Engine]:
    """Opens the engine alone, with the weights of `model_path` or else of model.path.

    Raises:
        TreegraftError: the engine cannot be made.
    """
    place = model_path or config.model.path
    # The vocabulary of a tiny model is that of tasks and tools.
    scenario = _Scenario(config, None)
    model, tokenizer = scenario.load_model(model_path, has_weights=needs_weights(config, place))
    async with opened_engine(config, model, tokenizer, place) as engine:
        yield engine


@asynccontextmanager
async def assemble_training(
    config: Config,
    *,
    source: TaskSource | None = None,
    checkpoint: Path | None = None,
    ranks: Ranks | None = None,
    placement: Placement | None = None,
) -> AsyncIterator[TrainingParts]:
    """Holds the parts of a training.

    Args:
        source: tasks made already; None builds them.
        checkpoint: where to go on from, weights and optimiser; None for the beginning.
        ranks: the processes that learn together, of which this one is the first; None for this one
            alone.
        placement: where engines and growers stand; None for this process.

    Raises:
        TreegraftError: a part that cannot be made, before any work starts.
    """
    async with AsyncExitStack() as stack:
        with ctrl_c_ends_at_once():
            # Imported here, so that `treegraft --help` and config checks start without torch.
            from treegraft.policy.learn.credit import find_credit_rule
            from treegraft.policy.load import with_gradients

            stack.enter_context(with_gradients())
            credit_rule = find_credit_rule(config)
            scenario = _Scenario(config, source)
            # Adapters are restored with the optimiser's state, onto the model that they adapt.
            model_path = None if config.model.lora.rank else checkpoint
            source_path = model_path or config.model.path
            files = None if ranks is None else _weight_files(config, source_path)
            model, tokenizer = scenario.load_model(model_path, has_weights=files is None)
            # Adapters change the model in place, so the engine's copy comes first. Another engine
            # has its own.
            has_copy = config.engine.kind == "native" and placement is None
            own = copy.deepcopy(model).requires_grad_(False) if has_copy else None
            trained = _adapted(config, model)
            opening: AbstractAsyncContextManager[Engine]
            if placement is None:
                count = 1 if ranks is None else ranks.size
                opening = opened_engine(config, own or trained, tokenizer, source_path, count)
            else:
                opening = placement.engine(config, model_path)
            engine = await stack.enter_async_context(opening)
            parts = scenario.parts(stack, model, engine, tokenizer, model_path, placement)
            learner = _build_learner(config, trained, checkpoint, ranks, files)
            # Several ranks hold it in parts.
            del model, trained
        yield TrainingParts(
            **vars(parts),
            explorer=training_explorer(config, tokenizer),
            learner=learner,
            credit_rule=credit_rule,
        )


def build_own_learner(parts: Setup) -> Learner:
    """Returns a learner as a training's at its beginning, with weights of its own.

    Raises:
        ModelError, SettingError: a model that cannot be loaded or learned.
    """
    learner = _build_learner(
        parts.config, _adapted(parts.config, parts.load_model()), None, None, None
    )
    return cast("Learner", learner)


def _adapted(config: Config, model: Any) -> Any:
    """The model with the recipe's adapters."""
    from treegraft.policy.load import with_adapters

    try:
        return with_adapters(model, config.model, seed=config.run.seed)
    except ValueError as error:
        raise SettingError(
            f"model.lora: got targets {config.model.lora.targets!r}, which do not fit the model:"
            f" {error}",
            code="lora-targets-mismatch",
        ) from error


def training_explorer(config: Config, tokenizer: Tokenizer) -> Explorer:
    """Returns the explorer of a training. Raises `SettingError` for an unknown one."""
    return build_explorer(config.explore, vocab_size=len(tokenizer), penalty=config.reward.penalty)


def _weight_files(config: Config, model_path: Path | str) -> Sequence[Path] | None:
    """The files from which ranks read the weights by themselves, None for none."""
    from treegraft.policy.learn.weight_files import shardable_files

    with about("model.path"):
        return shardable_files(config, model_path)


def _build_learner(
    config: Config,
    model: Any,
    checkpoint: Path | None,
    ranks: Ranks | None,
    files: Sequence[Path] | None,
) -> LearnerLike:
    if ranks is not None:
        from treegraft.policy.learn.leader import Leader

        return Leader(ranks, model, config, checkpoint, files)
    from treegraft.policy.learn.learner import Learner

    learner = Learner(
        model,
        config.learn,
        config.loss,
        length_constant=config.rollout.max_completion_tokens,
        num_updates=config.run.num_updates,
        shares_card=config.engine.shares_card,
    )
    if checkpoint is not None:
        learner.load(checkpoint)
    return learner


class _Scenario:
    """The parts that need no model: tasks, rewards, environment and tools. Made and checked first,
    so that contradictions are refused before weights are loaded."""

    def __init__(self, config: Config, source: TaskSource | None) -> None:
        self.config = config
        self.tasks = source or build_tasks(config.tasks, config.run.seed)
        self.rewards = build_rewards(config.reward, config.rollout.max_completion_tokens)
        self.kind = open_environments(config.environment)
        own_tools = [*self.tasks.tools(), *(self.kind.tools if self.kind else ())]
        self.tools = build_tools(config.tools, own_tools)
        # Only its kind matters here; the tokenizer, whose size it takes, comes later.
        explorer = build_explorer(config.explore, vocab_size=2)
        refuse(check(config, explorer, self.tools, self.kind))

    def load_model(self, path: Path | str | None, *, has_weights: bool) -> tuple[Any, Tokenizer]:
        """Returns (model, tokenizer) of model.path, or of `path` where one is given."""
        from treegraft.policy.load import limit_threads, load_model

        config = self.config
        limit_threads(config.run.num_threads)
        settings = config.model
        if path is not None:
            settings = settings.model_copy(update={"path": str(path)})
        is_tiny = settings.path == "tiny"
        words = closed_vocabulary(self.tasks, self.tools, config.warmup) if is_tiny else []
        with about("model.path"):
            return load_model(
                settings, vocabulary=words, seed=config.run.seed, has_weights=has_weights
            )

    def parts(
        self,
        stack: AsyncExitStack,
        model: Any,
        engine: Engine,
        tokenizer: Any,
        model_path: Path | str | None,
        placement: Placement | None = None,
    ) -> Parts:
        """Returns the parts; those that have to be closed go onto the stack.

        Args:
            model: for its configuration alone.
        """
        is_ours = model_path is not None and (Path(model_path) / "treegraft").is_dir()
        setup = self.setup(stack, model, tokenizer, is_ours=is_ours, max_context=engine.max_context)
        return Parts(**vars(setup), engine=engine, placement=placement)

    def setup(
        self,
        stack: AsyncExitStack,
        model: Any,
        tokenizer: Any,
        *,
        is_ours: bool,
        max_context: int | None = None,
    ) -> Setup:
        """Returns the parts that need no weights.

        Args:
            is_ours: the tokenizer comes from a checkpoint of ours, which holds the template
                already.
            max_context: of the engine, in tokens.
        """
        from treegraft.policy import output_head

        config = self.config
        # The learner packs whole paths, so its model's limit counts beside the engine's.
        own = output_head.max_context(model)
        limits = [limit for limit in (own, max_context) if limit is not None]
        max_prompt = None
        if limits:
            refuse(check_context(config, min(limits)))
            max_prompt = min(limits) - longest_completion(config)[1]
        if not is_ours:
            use_template(config.format.chat_template, tokenizer)
        form = build_format(
            config.format,
            tokenizer,
            self.tools,
            max_context=max_prompt,
            end_ids=output_head.end_token_ids(model, tokenizer.eos_token_id),
            mentions_retrieval="graft" in config.explore.explorers,
        )
        environments = None if self.kind is None else Environments(self.kind, config.environment)
        toolbox = Toolbox(self.tools, config.tools, environments)
        stack.push_async_callback(toolbox.close)
        return Setup(
            config=config,
            source=self.tasks,
            tokenizer=tokenizer,
            format=form,
            max_prompt=max_prompt,
            toolbox=toolbox,
            kind=self.kind,
            rewards=self.rewards,
            load_model=lambda: self.load_model(None, has_weights=True)[0],
            scorer=build_scorer(config, self.rewards, form.written_text),
        )


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
    limits, own = training_limits(config), config.eval
    filters = Filters(repetition_penalty=own.repetition_penalty)
    # The most likely token stays whatever else is left out.
    if temperature > 0:
        filters = replace(filters, top_k=own.top_k, top_p=own.top_p, min_p=own.min_p)
    names = ("max_completion_tokens", "max_agent_steps", "max_tool_calls")
    given = {name: value for name in names if (value := getattr(own, name)) is not None}
    return replace(limits, num_leaves=num_leaves, temperature=temperature, filters=filters, **given)
