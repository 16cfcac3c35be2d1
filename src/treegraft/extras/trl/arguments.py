"""From a recipe to TRL's arguments; what cannot mean anything there is refused by its name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from trl import GRPOConfig

from treegraft import Config, SettingError, load_config
from treegraft.extras.hosts import Derived, Host, Only

LOSS_TYPES = {"token-mean": "dapo", "sequence-mean": "grpo", "sequence-sum": "dr_grpo"}
"""TRL's name of each aggregation: the same sums."""


CHECKPOINTING = next(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in GRPOConfig.__dataclass_fields__
)
"""Its name in the version of transformers that is installed; newer ones have both."""


HOST = Host(
    name="TRL",
    own=(
        Only(
            "learn.num_minibatches",
            1,
            "TRL mixes the rows of all trees among the steps of a generation, and a step has to"
            " hold whole trees",
        ),
    ),
    engine="which has a vLLM of its own and gives it the weights: grpo_config(recipe,"
    " use_vllm=True)",
    maker="grpo_config(recipe, ...)",
)

_BY_TREES = "the rollouts are trees by the recipe's [explore], [rollout] and [engine]"
_BY_REWARD = "rewards and their weights are the recipe's [reward]"
_OF_ROWS = "steps of a row have advantages of their own, and it treats the row as one"
TRL = {
    "mask_truncated_completions": "loss.learn_from_truncated of the recipe says it",
    "importance_sampling_level": _OF_ROWS,
    "off_policy_mask_threshold": _OF_ROWS,
    "multi_objective_aggregation": _BY_REWARD,
    "reward_weights": _BY_REWARD,
    "entropy_coef": "loss.entropy_coef of the recipe says it",
    "top_p": _BY_TREES,
    "top_k": _BY_TREES,
    "min_p": _BY_TREES,
    "repetition_penalty": _BY_TREES,
    "generation_kwargs": _BY_TREES,
    "cache_implementation": _BY_TREES,
    "use_transformers_continuous_batching": _BY_TREES,
    "max_tool_calling_iterations": "rollout.max_tool_calls of the recipe says it",
    "chat_template_kwargs": "format.template_options of the recipe says it",
    "num_train_epochs": "leave it out; run.num_updates of the recipe says it",
    "remove_unused_columns": "rows find their task by a column",
    "do_eval": "trees are for training; measure a checkpoint with `treegraft eval`",
    "eval_strategy": "trees are for training; measure a checkpoint with `treegraft eval`",
}
"""TRL's arguments that have to keep their default, and why."""
VLLM = {
    "vllm_mode": "trees get their tokens from the vLLM in the trainer's process",
    "vllm_structured_outputs_regex": _BY_TREES,
    "vllm_tensor_parallel_size": "processes of a group have to request the same tokens in one"
    " order, and tools answer in none",
}
"""The same with use_vllm."""


def derived(config: Config, *, uses_vllm: bool) -> dict[str, Derived]:
    """Returns TRL's arguments that a recipe gives, by name; batch sizes are not among them."""
    return _of_training(config) | (_of_vllm(config) if uses_vllm else {})


def _of_vllm(config: Config) -> dict[str, Derived]:
    cap = config.loss.engine_ratio_cap
    found = {"vllm_importance_sampling_correction": Derived(cap is not None, "engine_ratio_cap")}
    if cap is not None:
        mode = f"{config.loss.engine_ratio}_truncate"
        found["vllm_importance_sampling_mode"] = Derived(mode, "engine_ratio")
        found["vllm_importance_sampling_clip_max"] = Derived(cap, "engine_ratio_cap")
        found["vllm_importance_sampling_clip_min"] = Derived(None, "engine_ratio_cap")
    return {name: Derived(value, f"loss.{source}") for name, (value, source) in found.items()}


def _of_training(config: Config) -> dict[str, Derived]:
    loss = config.loss
    learn = config.learn
    model = config.model
    schedule: str = learn.schedule
    # TRL's "constant" ignores the warm-up.
    if schedule == "constant" and learn.lr_warmup_steps:
        schedule = "constant_with_warmup"
    return {
        "num_generations": Derived(config.explore.num_leaves, "explore.num_leaves"),
        "temperature": Derived(config.rollout.temperature, "rollout.temperature"),
        "max_completion_length": Derived(
            config.rollout.max_completion_tokens, "rollout.max_completion_tokens"
        ),
        "loss_type": Derived(LOSS_TYPES[loss.aggregation], "loss.aggregation"),
        "epsilon": Derived(loss.clip_low, "loss.clip_low"),
        "epsilon_high": Derived(loss.clip_high, "loss.clip_high"),
        "delta": Derived(loss.dual_clip, "loss.dual_clip"),
        "beta": Derived(loss.kl_coef, "loss.kl_coef"),
        # Treegraft's KL term has no ratio, and RAPO's shaping is in TRL's.
        "use_bias_correction_kl": Derived(False, "loss.kl_coef"),
        # The advantages are ours, and divided already.
        "scale_rewards": Derived("none", "credit.advantage"),
        "num_iterations": Derived(learn.num_epochs, "learn.num_epochs"),
        "learning_rate": Derived(learn.lr, "learn.lr"),
        "adam_beta1": Derived(learn.betas[0], "learn.betas"),
        "adam_beta2": Derived(learn.betas[1], "learn.betas"),
        "weight_decay": Derived(learn.weight_decay, "learn.weight_decay"),
        "max_grad_norm": Derived(learn.max_grad_norm, "learn.max_grad_norm"),
        "warmup_steps": Derived(learn.lr_warmup_steps, "learn.lr_warmup_steps"),
        "lr_scheduler_type": Derived(schedule, "learn.schedule"),
        "lr_scheduler_kwargs": Derived({}, "learn.schedule"),
        "max_steps": Derived(config.run.num_updates * learn.num_epochs, "run.num_updates"),
        "seed": Derived(config.run.seed, "run.seed"),
        CHECKPOINTING: Derived(model.gradient_checkpointing, "model.gradient_checkpointing"),
        "trust_remote_code": Derived(model.trust_remote_code, "model.trust_remote_code"),
        # Ratios of the first step are 1 in Treegraft.
        "disable_dropout": Derived(True, "model"),
    }


def grpo_config(
    recipe: Config | Mapping[str, Any] | str | Path, **trl_arguments: Any
) -> GRPOConfig:
    """Returns TRL's arguments for a recipe.

    What both could say is the recipe's: see `derived`. A step has the run.tasks_per_update trees
    of an update, over all processes; where neither per_device_train_batch_size nor
    gradient_accumulation_steps is set, a pass has one tree.

    Args:
        trl_arguments: of `GRPOConfig`, for all else: output_dir, bf16, save_steps, deepspeed, ...

    Raises:
        SettingError: a setting or an argument that cannot mean anything there, or two that
            contradict each other.
    """
    config = load_config(recipe)
    check_recipe(config)
    # GRPOConfig would raise a TypeError without a hint.
    for name in trl_arguments:
        if name not in GRPOConfig.__dataclass_fields__ and name != "gradient_checkpointing":
            raise SettingError(
                f"{name}: TRL's GRPOConfig has no such argument.", code="unknown-argument"
            )
    if "gradient_checkpointing" in trl_arguments:
        trl_arguments[CHECKPOINTING] = trl_arguments.pop("gradient_checkpointing")
    uses_vllm = bool(trl_arguments.get("use_vllm"))
    given = {name: one.value for name, one in derived(config, uses_vllm=uses_vllm).items()}
    # TRL computes in bfloat16 by autocast, over weights in float32.
    given["bf16"] = config.model.dtype == "bfloat16"
    args = GRPOConfig(**(given | _batches(config, trl_arguments) | trl_arguments))
    check_arguments(config, args)
    return args


def _batches(config: Config, given: Mapping[str, Any]) -> dict[str, int]:
    """The missing sizes, so that a step has the trees of an update."""
    # By torchrun's variable: accelerate does not know it before GRPOConfig is made.
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    leaves = config.explore.num_leaves
    own = config.run.tasks_per_update * leaves // num_processes
    if "gradient_accumulation_steps" in given:
        num_passes = max(1, given["gradient_accumulation_steps"])
        rows = given.get("per_device_train_batch_size", max(1, own // num_passes))
        _check_whole(leaves, rows, num_passes)
        return {"per_device_train_batch_size": rows}
    rows = given.get("per_device_train_batch_size", leaves)
    num_passes = max(1, own // max(1, rows))
    # Before TRL says so in words of its own.
    _check_whole(leaves, rows, num_passes)
    return {"per_device_train_batch_size": rows, "gradient_accumulation_steps": num_passes}


def check_recipe(config: Config) -> None:
    """Raises `SettingError` for a recipe with a setting that TRL's loss or loop cannot have."""
    HOST.check_recipe(config)
    loss = config.loss
    # TRL bounds the ratio itself, which is the same from there on.
    if loss.dual_clip is not None and loss.dual_clip < 1 + loss.clip_high:
        raise SettingError(
            f"loss.dual_clip: got {loss.dual_clip:g}, expected 1 + loss.clip_high ="
            f" {1 + loss.clip_high:g} or more inside TRL, whose delta also bounds positive"
            " advantages.",
            code="trl-dual-clip",
        )


def check_arguments(config: Config, args: GRPOConfig) -> None:
    """Raises `SettingError` for arguments of TRL that have no meaning with trees, or that
    contradict the recipe; `grpo_config` makes the right ones."""
    reasons = TRL | (VLLM if args.use_vllm else {})
    fields = GRPOConfig.__dataclass_fields__
    only = [Only(name, fields[name].default, why) for name, why in reasons.items()]
    HOST.check_arguments(only, derived(config, uses_vllm=args.use_vllm), partial(getattr, args))
    if config.loss.engine_ratio_cap is not None and not args.use_vllm:
        raise SettingError(
            f"loss.engine_ratio_cap: got {config.loss.engine_ratio_cap:g}, expected none inside TRL"
            " without use_vllm: it has this correction for vLLM's samples alone.",
            code="trl-ratio-cap",
        )
    _check_batches(config, args)


def _check_batches(config: Config, args: GRPOConfig) -> None:
    if args.steps_per_generation != args.gradient_accumulation_steps:
        raise SettingError(
            f"steps_per_generation: got {args.steps_per_generation}, expected"
            f" {args.gradient_accumulation_steps}, that of gradient_accumulation_steps: an"
            " optimiser step has to hold all rows of its trees.",
            code="trl-steps",
        )
    leaves = config.explore.num_leaves
    num_processes = args.world_size
    rows = args.per_device_train_batch_size
    num_passes = args.gradient_accumulation_steps
    sizes = _check_whole(leaves, rows, num_passes)
    own = rows * num_passes
    if own * num_processes != config.run.tasks_per_update * leaves:
        raise SettingError(
            f"{sizes}, on {num_processes} processes: got {own * num_processes // leaves} trees for"
            f" each step, expected {config.run.tasks_per_update} by run.tasks_per_update of the"
            " recipe; whole trees have to lie on each process.",
            code="trl-trees",
        )
    # One process sees all trees of an update.
    if num_processes > 1:
        HOST.check_alone(config, f"on {num_processes} processes")


def _check_whole(leaves: int, rows: int, num_passes: int) -> str:
    """Raises `SettingError` for sizes that divide a tree among steps; returns them in words."""
    sizes = f"per_device_train_batch_size {rows} * gradient_accumulation_steps {num_passes}"
    if rows * num_passes % leaves:
        raise SettingError(
            f"{sizes}: got {rows * num_passes} rows for each process, expected whole trees of"
            f" {leaves} leaves (explore.num_leaves).",
            code="trl-rows",
        )
    return sizes
