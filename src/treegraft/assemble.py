"""From settings to the parts of a run: tasks, model, format, tools, engine, learner."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treegraft.core.errors import DataError, SettingError, nearest
from treegraft.core.interfaces import (
    Capability,
    Engine,
    EnvironmentKind,
    Explorer,
    Format,
    Retriever,
    TaskSource,
    Tool,
    Tracker,
    TreeScorer,
)
from treegraft.core.plugins import load_object
from treegraft.core.types import Task
from treegraft.explore.budget import Allocation, Budget, Rounds, Shares
from treegraft.explore.compose import Composed
from treegraft.explore.entropy import EntropyBranching
from treegraft.explore.graft import HybridRollout
from treegraft.explore.independent import Independent
from treegraft.rollout.formats.build import build_format, use_template
from treegraft.rollout.loop import Grower, Limits
from treegraft.settings.config import Config, EvalSettings, ExploreSettings, RolloutSettings
from treegraft.tasks.build import build_tasks
from treegraft.tasks.rewards import RewardScorer
from treegraft.tools.build import build_tools, open_environments
from treegraft.tools.environments.own import EnvironmentTool
from treegraft.tools.environments.sessions import Environments
from treegraft.tools.toolbox import Toolbox


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a run is made of."""

    config: Config
    source: TaskSource
    model: Any
    """The model to be trained (the engine has its own copy)."""
    tokenizer: Any
    format: Format
    max_prompt: int | None
    """Longest prompt that leaves room for a completion, in tokens; None for no limit."""
    toolbox: Toolbox
    engine: Engine
    scorer: TreeScorer

    def grower(
        self, explorer: Explorer, limits: Limits, retriever: Retriever | None = None
    ) -> Grower:
        """Returns what grows trees within `limits`; without a retriever nothing is grafted."""
        allocate = _allocation(self.config)
        return Grower(
            self.engine,
            self.format,
            self.toolbox,
            explorer,
            limits,
            self.scorer,
            retriever=retriever,
            allocate=allocate,
        )

    async def close(self) -> None:
        """Ends the engine's thread and the tools' processes."""
        await self.engine.close()
        await self.toolbox.close()


def assemble(
    config: Config, *, model_path: Path | str | None = None, source: TaskSource | None = None
) -> Parts:
    """Returns the parts that `config` describes.

    Args:
        model_path: load model and tokenizer from here instead of model.path (a checkpoint).
        source: tasks made already; None builds them.

    Raises:
        TreegraftError: what cannot be had, before any work starts.
    """
    from treegraft.policy.checkpoint import with_saved_adapter
    from treegraft.policy.head import end_token_ids
    from treegraft.policy.load import limit_threads, load_model, with_adapters

    limit_threads(config.run.num_threads)
    tasks = source or build_tasks(config.tasks, config.run.seed)
    scorer = RewardScorer.from_settings(
        config.reward, success_reward=config.environment.success_reward
    )
    settings = (
        config.model
        if model_path is None
        else config.model.model_copy(update={"path": str(model_path)})
    )
    kind = open_environments(config.environment)
    _refuse_rewards(config, kind)
    tools = build_tools(config.tools, [*tasks.tools(), *(kind.tools if kind else ())])
    _refuse_branching(build_explorer(config.explore, vocab_size=2), tools)
    _refuse_grafts(config, kind)
    # A closed vocabulary has a word for each tag, those of the user's own tools included.
    tags = [f"<{slash}{tool.name}>" for tool in tools for slash in ("", "/")]
    vocabulary = [*words, *tags] if (words := tasks.vocabulary()) else []
    model, tokenizer = load_model(settings, vocabulary=vocabulary, seed=config.run.seed)
    if model_path is not None:
        model = with_saved_adapter(model, Path(model_path))
    max_prompt = _room_for_prompts(config, model)
    if (
        model_path is None or not (Path(model_path) / "treegraft").is_dir()
    ):  # a checkpoint of ours holds the template already
        use_template(config.format, tokenizer)
    form = build_format(
        config.format,
        tokenizer,
        tools,
        max_context=max_prompt,
        end_ids=end_token_ids(model, tokenizer),
        mentions_retrieval="graft" in config.explore.explorers,
    )
    # Adapters change the model in place, so the engine's copy comes first.
    engine_model = (
        copy.deepcopy(model).requires_grad_(False) if config.engine.kind == "native" else model
    )
    try:
        trained = with_adapters(model, config.model, seed=config.run.seed)
    except ValueError as error:
        raise SettingError(
            f"model.lora: got targets {config.model.lora.targets!r}, which do not fit the model:"
            f" {error}"
        ) from error
    return Parts(
        config=config,
        source=tasks,
        model=trained,
        tokenizer=tokenizer,
        format=form,
        max_prompt=max_prompt,
        toolbox=Toolbox(
            tools, config.tools, None if kind is None else Environments(kind, config.environment)
        ),
        engine=_build_engine(config, engine_model, tokenizer),
        scorer=scorer,
    )


def _room_for_prompts(config: Config, model: Any) -> int | None:
    """The longest prompt that leaves room for a completion, in tokens; None where the model names
    no limit."""
    from treegraft.policy.head import max_context

    limit = max_context(model)
    if limit is None:
        return None
    name, wanted = max(
        ("rollout.max_completion_tokens", config.rollout.max_completion_tokens),
        ("eval.max_completion_tokens", config.eval.max_completion_tokens or 0),
        key=lambda item: item[1],
    )
    if wanted >= limit:
        raise SettingError(
            f"{name} is {wanted}, but model '{config.model.path}' reads {limit} tokens in all;"
            " lower it so that prompts fit too."
        )
    return limit - wanted


def check_prompts(parts: Parts, tasks: Sequence[Task]) -> None:
    """Refuses tasks whose prompt cannot be made, all of them at once and before any work.

    Raises:
        DataError: the first such task, and how many there are.
    """
    bad: list[str] = []
    overhead = len(parts.format.prompt_ids(Task(id="probe", question="?", reference=())))
    for task in tasks:
        # A plain letter is a token at most, so short plain questions need no encoding: 10,000 tasks
        # take no time.
        is_plain = task.question.isascii() and not set(task.question) & set("<[|")
        if is_plain and (
            parts.max_prompt is None or len(task.question) + overhead <= parts.max_prompt
        ):
            continue
        try:
            parts.format.prompt_ids(task)
        except DataError as error:
            bad.append(str(error))
    if bad:
        raise DataError(
            bad[0]
            + (
                f" The same holds for {len(bad)} of {len(tasks)} tasks in all."
                if len(bad) > 1
                else ""
            )
        )


def _build_engine(config: Config, model: Any, tokenizer: Any) -> Engine:
    if config.engine.kind == "native":
        from treegraft.policy.engine.native import NativeEngine

        return NativeEngine(model, tokenizer, config.engine)
    if ":" not in config.engine.kind:
        raise SettingError(
            f"engine.kind is '{config.engine.kind}'; expected \"native\" or an import path"
            f" 'package.module:Engine'.{nearest(config.engine.kind, ['native'])}"
        )
    engine: Engine = load_object(config.engine.kind)(
        model=model, tokenizer=tokenizer, settings=config.engine
    )
    return engine


def max_live_trees(config: Config) -> int:
    """Returns how many trees may grow at once without one's rows pushing out another's."""
    return max(
        1, min(config.rollout.max_live_trees, config.engine.max_rows // config.explore.num_leaves)
    )


def build_explorer(settings: ExploreSettings, *, vocab_size: int) -> Explorer:
    """Returns the explorer of a recipe, several composed into one.

    Args:
        vocab_size: the tokenizer's, V in ARPO's normaliser.

    Raises:
        SettingError: an unknown name.
    """
    explorers = [_one_explorer(name, settings, vocab_size) for name in settings.explorers]
    return explorers[0] if len(explorers) == 1 else Composed(explorers)


def _one_explorer(name: str, settings: ExploreSettings, vocab_size: int) -> Explorer:
    if name == "independent":
        return Independent()
    if name == "entropy":
        own = settings.entropy
        normalisers = {
            "vocabulary": float(vocab_size),
            "log_vocabulary": math.log(vocab_size),
            "none": 1.0,
        }
        return EntropyBranching(
            num_starts=own.num_starts,
            num_branches=own.num_branches,
            probe_tokens=own.probe_tokens,
            rule=own.rule,
            base_prob=own.base_prob,
            entropy_weight=own.entropy_weight,
            threshold=own.threshold,
            statistic=own.statistic,
            normaliser=normalisers[own.normaliser],
        )
    if name == "graft":
        return HybridRollout(
            num_hybrid=settings.graft.num_hybrid,
            num_leaves=settings.num_leaves,
            num_starts=_num_starts(settings),
            probability=settings.graft.probability,
            whole=settings.graft.unit == "trajectory",
        )
    if ":" in name:
        explorer: Explorer = load_object(name)()
        return explorer
    known = ["independent", "entropy", "graft"]
    raise SettingError(
        f"explore.explorers names '{name}'; expected {', '.join(known)} or an import path"
        f" 'package.module:Explorer'.{nearest(name, known)}"
    )


def _num_starts(settings: ExploreSettings) -> int:
    """First-level rollouts that a tree opens at once: the first explorer decides."""
    is_entropy = settings.explorers[0] == "entropy"
    return (
        min(settings.entropy.num_starts, settings.num_leaves) if is_entropy else settings.num_leaves
    )


def _allocation(config: Config) -> Callable[[Budget], Allocation]:
    own = config.explore.entropy
    if own.allocation == "shares":
        return lambda budget: Shares(budget, min(_num_starts(config.explore), budget.max_leaves))
    return lambda budget: Rounds(budget, own.ranking)


def _refuse_branching(explorer: Explorer, tools: Sequence[Tool]) -> None:
    """Refuses explorers that branch over a state which cannot be had again."""
    if explorer.probe_tokens is None:
        return
    own = [tool for tool in tools if isinstance(tool, EnvironmentTool)]
    if own and own[0].capability is Capability.NONE:
        raise SettingError(
            "explore.explorers: trees would branch over the environment of the tools"
            f" {[tool.name for tool in own]}, whose capability is 'none'; expected 'fork' or"
            " 'replay'. Declare one of them in the class or as environment.capability, or use"
            " explorers that do not branch."
        )
    stateful = [
        tool.name
        for tool in tools
        if tool not in own and tool.capability is not Capability.STATELESS
    ]
    if stateful:
        raise SettingError(
            f"explore.explorers: trees would branch over the tools {stateful}, whose state two"
            " branches cannot share; expected stateless tools, or an environment that can fork or"
            " replay, which each trajectory has one of. Use explorers that do not branch, make the"
            " tool stateless, or make it a method of an [environment]."
        )


def _refuse_grafts(config: Config, kind: EnvironmentKind | None) -> None:
    """Refuses grafts over a state on which their calls cannot be tried."""
    if (
        "graft" in config.explore.explorers
        and kind is not None
        and kind.capability is Capability.NONE
    ):
        raise SettingError(
            "explore.explorers: got 'graft' with an environment whose capability is 'none';"
            " expected 'fork' or 'replay', since a grafted step's calls are made on a copy first."
            " Declare one of them, or leave 'graft' out."
        )


def _refuse_rewards(config: Config, kind: EnvironmentKind | None) -> None:
    """Refuses the environment's reward where there is none."""
    if "environment" in config.reward.funcs and (kind is None or not kind.has_reward):
        what = (
            "environment.kind is empty"
            if kind is None
            else f"'{kind.name}' has no method get_reward"
        )
        raise SettingError(
            f"reward.funcs: got 'environment', but {what}; expected an environment with a reward."
        )


def find_trackers(names: list[str]) -> list[Callable[[Path], Tracker]]:
    """Returns what makes the trackers of a recipe, each from the run folder.

    Raises:
        SettingError: an unknown name, or an extra that is not installed.
    """
    makers: list[Callable[[Path], Tracker]] = []
    for name in names:
        if name == "tensorboard":
            from treegraft.runs.tensorboard import find_tensorboard

            makers.append(find_tensorboard())
        elif ":" in name:
            makers.append(load_object(name))
        else:
            raise SettingError(
                f"track.trackers names '{name}'; expected \"tensorboard\" or an import path"
                f" 'package.module:Tracker'.{nearest(name, ['tensorboard'])}"
            )
    return makers


def training_limits(config: Config) -> Limits:
    """Returns what one training trajectory may use."""
    return _limits(config.rollout, config.explore.num_leaves, config.rollout.temperature, None)


def eval_limits(config: Config, *, temperature: float, num_leaves: int) -> Limits:
    """Returns what one trajectory of an evaluation may use."""
    return _limits(config.rollout, num_leaves, temperature, config.eval)


def _limits(
    rollout: RolloutSettings, num_leaves: int, temperature: float, evaluation: EvalSettings | None
) -> Limits:
    tokens = rollout.max_completion_tokens
    if evaluation is not None and evaluation.max_completion_tokens is not None:
        tokens = evaluation.max_completion_tokens
    return Limits(
        num_leaves=num_leaves,
        temperature=temperature,
        max_completion_tokens=tokens,
        max_agent_steps=rollout.max_agent_steps,
        max_tool_calls=rollout.max_tool_calls,
        deadline_s=rollout.deadline_s,
    )
