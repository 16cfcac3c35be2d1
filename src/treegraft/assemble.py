"""From settings to the parts of a run: tasks, model, format, tools, engine, learner."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treegraft.config import Config, EvalSettings, RolloutSettings
from treegraft.errors import SettingError, nearest
from treegraft.explore.independent import Independent
from treegraft.interfaces import Engine, Explorer, Format, TaskSource, Tracker, TreeScorer
from treegraft.plugins import load_object
from treegraft.rollout.formats.tags import TagsFormat
from treegraft.rollout.loop import Grower, Limits
from treegraft.tasks.build import build_tasks
from treegraft.tasks.rewards import RewardScorer
from treegraft.tools.build import build_tools
from treegraft.tools.toolbox import Toolbox

EXPLORERS: Mapping[str, Callable[[], Explorer]] = {"independent": Independent}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a run is made of."""

    config: Config
    source: TaskSource
    model: Any
    """The model to be trained (the engine has its own copy)."""
    tokenizer: Any
    format: Format
    toolbox: Toolbox
    engine: Engine
    scorer: TreeScorer

    def grower(self, explorer: Explorer, limits: Limits) -> Grower:
        """Returns what grows trees within `limits`."""
        return Grower(self.engine, self.format, self.toolbox, explorer, limits, self.scorer)

    async def close(self) -> None:
        """Ends the engine's thread and the tools' processes."""
        await self.engine.close()
        await self.toolbox.close()


def assemble(config: Config, *, model_path: Path | str | None = None, source: TaskSource | None = None) -> Parts:
    """Returns the parts that `config` describes.

    Args:
        model_path: load model and tokenizer from here instead of model.path (a checkpoint).
        source: tasks made already; None builds them.

    Raises:
        TreegraftError: what cannot be had, before any work starts.
    """
    import torch

    from treegraft.models import end_token_ids, load_model, max_context

    if config.run.num_threads is not None:
        torch.set_num_threads(config.run.num_threads)
    tasks = source or build_tasks(config.tasks, config.run.seed)
    settings = config.model if model_path is None else config.model.model_copy(update={"path": str(model_path)})
    model, tokenizer = load_model(settings, vocabulary=tasks.vocabulary(), seed=config.run.seed)
    tools = build_tools(config.tools, tasks.tools())
    limit = max_context(model)
    room = None if limit is None else limit - config.rollout.max_completion_tokens
    if room is not None and room < 1:
        raise SettingError(
            f"rollout.max_completion_tokens is {config.rollout.max_completion_tokens}, but model '{settings.path}' reads "
            f"{limit} tokens in all; lower it so that the prompt fits too"
        )
    toolbox = Toolbox(
        tools,
        deadline_s=config.tools.deadline_s,
        max_output_chars=config.tools.max_output_chars,
        cache=config.tools.cache,
        max_concurrent=config.tools.max_concurrent,
    )
    return Parts(
        config=config,
        source=tasks,
        model=with_adapters(model, config),
        tokenizer=tokenizer,
        format=TagsFormat(
            tokenizer,
            tools,
            system_prompt=config.format.system_prompt,
            require_think=config.format.require_think,
            require_boxed=config.format.require_boxed,
            max_context=room,
            end_ids=end_token_ids(model, tokenizer),
        ),
        toolbox=toolbox,
        engine=_build_engine(config, model, tokenizer),
        scorer=RewardScorer.from_settings(config.reward),
    )


def with_adapters(model: Any, config: Config) -> Any:
    """Returns the model with LoRA adapters where the recipe asks for them, seeded by run.seed."""
    lora = config.model.lora
    if not lora.rank:
        if config.model.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.train()
        return model
    import torch
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.run.seed)
        adapted = get_peft_model(
            model, LoraConfig(r=lora.rank, lora_alpha=lora.alpha, lora_dropout=0.0, target_modules=lora.targets)
        )
    if config.model.gradient_checkpointing:
        adapted.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        adapted.enable_input_require_grads()
        adapted.train()
    return adapted


def _build_engine(config: Config, model: Any, tokenizer: Any) -> Engine:
    if config.engine.kind == "native":
        from treegraft.engine.native import NativeEngine

        own = copy.deepcopy(model).requires_grad_(False)
        return NativeEngine(own, tokenizer, config.engine, num_prompts=max_live_trees(config) + 1)
    if ":" not in config.engine.kind:
        raise SettingError(
            f"engine.kind is '{config.engine.kind}'; expected \"native\" or an import path 'package.module:Engine'."
            f"{nearest(config.engine.kind, ['native'])}"
        )
    engine: Engine = load_object(config.engine.kind)(model=model, tokenizer=tokenizer, settings=config.engine)
    return engine


def max_live_trees(config: Config) -> int:
    """Returns how many trees may grow at once without one's rows pushing out another's."""
    return max(1, min(config.rollout.max_live_trees, config.engine.max_rows // config.explore.num_leaves))


def build_explorer(names: list[str]) -> Explorer:
    """Returns the explorer of a recipe.

    Raises:
        SettingError: an unknown name, or more than one.
    """
    if len(names) != 1:
        raise SettingError(f'explore.explorers holds {names}; expected exactly one, e.g. ["independent"]')
    name = names[0]
    if name in EXPLORERS:
        return EXPLORERS[name]()
    if ":" in name:
        explorer: Explorer = load_object(name)()
        return explorer
    raise SettingError(
        f"explore.explorers names '{name}'; expected {', '.join(EXPLORERS)} or an import path 'package.module:Explorer'."
        f"{nearest(name, EXPLORERS)}"
    )


def build_trackers(names: list[str], run_dir: Path) -> list[Tracker]:
    """Returns the trackers of a recipe.

    Raises:
        SettingError: an unknown name, or an extra that is not installed.
    """
    trackers: list[Tracker] = []
    for name in names:
        if name == "tensorboard":
            from treegraft.track.tensorboard import TensorBoardTracker

            trackers.append(TensorBoardTracker(run_dir))
        elif ":" in name:
            trackers.append(load_object(name)(run_dir))
        else:
            raise SettingError(
                f"track.trackers names '{name}'; expected \"tensorboard\" or an import path 'package.module:Tracker'."
                f"{nearest(name, ['tensorboard'])}"
            )
    return trackers


def training_limits(config: Config) -> Limits:
    """Returns what one training trajectory may use."""
    return _limits(config.rollout, config.explore.num_leaves, config.rollout.temperature, None)


def eval_limits(config: Config, *, temperature: float, num_leaves: int) -> Limits:
    """Returns what one trajectory of an evaluation may use."""
    return _limits(config.rollout, num_leaves, temperature, config.eval)


def _limits(rollout: RolloutSettings, num_leaves: int, temperature: float, evaluation: EvalSettings | None) -> Limits:
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
