"""From a recipe to verl's arguments; what cannot mean anything there is refused by its name.
Without verl."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from treegraft import Config, SettingError, load_config
from treegraft.extras.hosts import Derived, Host, Only

AGGREGATIONS = {
    "token-mean": "token-mean",
    "sequence-mean": "seq-mean-token-mean",
    "sequence-sum": "seq-mean-token-sum-norm",
}
"""verl's name of each aggregation: the same sums."""
NO_DUAL_CLIP = 1e9
"""`clip_ratio_c` that never acts: verl bounds ratios by e^20 < 4.9e8."""
TRAINER = "treegraft"
"""Its name in `trainer.v1.trainer_mode`."""
MANAGER = "treegraft.extras.verl.TreeManager"
"""Its name in `actor_rollout_ref.rollout.agent.agent_loop_manager_class`."""
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


_MANAGER = f"{ROLLOUT}.agent.agent_loop_manager_class"


_NOT_WEIGHTED = "verl's own term is not scaled by the leaves' weights"
HOST = Host(
    name="verl",
    own=(
        Only("loss.entropy_coef", 0.0, _NOT_WEIGHTED),
        Only("loss.engine_ratio_cap", None, "verl's rollout correction is another one"),
        Only("model.lora.rank", 0, "verl's own lora_rank says it"),
    ),
    engine="whose own servers sample",
    maker="treegraft verl-args RECIPE",
)

_BY_TREES = "the rollouts are trees by the recipe"
_RATIO = "old log-probabilities hold RAPO's shaping"
VERL = (
    Only("trainer.use_v1", True, "the older trainer has no place for trees"),
    Only("actor_rollout_ref.model.tokenizer_path", None, "trees are written with the model's own"),
    Only("algorithm.use_kl_in_reward", False, "advantages are the recipe's; loss.kl_coef says it"),
    Only("algorithm.rollout_correction.bypass_mode", False, f"{_RATIO}; loss.old_logprobs says it"),
    Only("algorithm.rollout_correction.rollout_is", None, f"{_RATIO}, which its weights need"),
    Only(
        "algorithm.rollout_correction.rollout_rs",
        None,
        "it takes tokens out of the loss that leaf weights and denominators count",
    ),
    Only("algorithm.filter_groups.enable", False, "a step's groups are the recipe's"),
    Only("reward.reward_model.enable", False, "rewards are the recipe's [reward]"),
    Only("distillation.enabled", False, "its loss needs a teacher's columns"),
    Only(f"{ACTOR}.entropy_coeff", 0, _NOT_WEIGHTED),
    Only(f"{ACTOR}.shuffle", False, "a minibatch has to hold whole trees"),
    Only(f"{ACTOR}.policy_loss.loss_mode", "vanilla", "the others are not Treegraft's objective"),
    Only(f"{ACTOR}.use_prefix_grouper", False, "rows of a tree share more than their prompt"),
    Only(f"{ROLLOUT}.name", "vllm", "only for vLLM is there a server that reports entropies"),
    Only(f"{ROLLOUT}.top_p", 1, _BY_TREES),
    Only(f"{ROLLOUT}.top_k", -1, _BY_TREES),
    Only(f"{ROLLOUT}.ignore_eos", False, _BY_TREES),
    Only(f"{ROLLOUT}.full_determinism", False, "its one seed would give all branches equal tokens"),
    Only(f"{ROLLOUT}.multi_turn.enable", False, "tools are the recipe's [tools]"),
    Only(f"{ROLLOUT}.logprobs_mode", "processed_logprobs", "they are of softmax(logits / T)"),
)
"""verl's arguments that have to keep their default."""


def derived(config: Config) -> dict[str, Derived]:
    """Returns verl's arguments that a recipe gives, by their dotted names."""
    loss = config.loss
    learn = config.learn
    run = config.run
    longest = config.rollout.max_completion_tokens
    found = {
        "actor_rollout_ref.model.path": (config.model.path, "model.path"),
        "data.train_batch_size": (run.tasks_per_update, "run.tasks_per_update"),
        "data.max_response_length": (longest, "rollout.max_completion_tokens"),
        f"{ROLLOUT}.n": (config.explore.num_leaves, "explore.num_leaves"),
        f"{ROLLOUT}.temperature": (config.rollout.temperature, "rollout.temperature"),
        f"{ROLLOUT}.calculate_log_probs": (True, "loss.old_logprobs"),
        _MANAGER: (MANAGER, "explore.explorers"),
        f"{ACTOR}.ppo_mini_batch_size": (
            run.tasks_per_update // learn.num_minibatches,
            "learn.num_minibatches",
        ),
        f"{ACTOR}.ppo_epochs": (learn.num_epochs, "learn.num_epochs"),
        f"{ACTOR}.loss_agg_mode": (AGGREGATIONS[loss.aggregation], "loss.aggregation"),
        f"{ACTOR}.loss_scale_factor": (
            (loss.length_constant or longest) if loss.aggregation == "sequence-sum" else None,
            "loss.length_constant",
        ),
        f"{ACTOR}.clip_ratio_low": (loss.clip_low, "loss.clip_low"),
        f"{ACTOR}.clip_ratio_high": (loss.clip_high, "loss.clip_high"),
        f"{ACTOR}.clip_ratio_c": (loss.dual_clip or NO_DUAL_CLIP, "loss.dual_clip"),
        f"{ACTOR}.use_kl_loss": (loss.kl_coef > 0, "loss.kl_coef"),
        f"{ACTOR}.kl_loss_type": ("low_var_kl", "loss.kl_coef"),
        f"{ACTOR}.optim.lr": (learn.lr, "learn.lr"),
        f"{ACTOR}.optim.betas": (list(learn.betas), "learn.betas"),
        f"{ACTOR}.optim.weight_decay": (learn.weight_decay, "learn.weight_decay"),
        f"{ACTOR}.optim.clip_grad": (learn.max_grad_norm, "learn.max_grad_norm"),
        f"{ACTOR}.optim.lr_warmup_steps": (learn.lr_warmup_steps, "learn.lr_warmup_steps"),
        f"{ACTOR}.optim.lr_scheduler_type": (learn.schedule, "learn.schedule"),
        f"{ACTOR}.optim.min_lr_ratio": (0.0, "learn.schedule"),
        "algorithm.adv_estimator": ("grpo", "credit.advantage"),
        "trainer.v1.trainer_mode": (TRAINER, "explore.explorers"),
        "trainer.total_training_steps": (run.num_updates, "run.num_updates"),
    }
    if loss.kl_coef:
        found[f"{ACTOR}.kl_loss_coef"] = (loss.kl_coef, "loss.kl_coef")
    return {name: Derived(*one) for name, one in found.items()}


def arguments(recipe: Path | str, changes: Sequence[str]) -> list[str]:
    """Returns verl's arguments for a recipe, as for its command line.

    Args:
        recipe: written down for verl's trainer, which reads it again.
        changes: settings on the command line, such as "explore.num_leaves=8".

    Raises:
        SettingError: a setting that cannot mean anything there.
    """
    config = load_config(recipe, changes)
    check_recipe(config)
    given: dict[str, Any] = {"+treegraft.recipe": str(recipe)}
    if changes:
        given["+treegraft.changes"] = list(changes)
    given |= {name: one.value for name, one in derived(config).items()}
    # Of this one verl's own configuration has no entry to change.
    # "++" adds an entry where hydra would refuse an unknown one.
    given[f"++{_MANAGER}"] = given.pop(_MANAGER)
    return [f"{name}={_written(value)}" for name, value in given.items()]


def _written(value: Any) -> str:
    """A value as hydra's command line reads it."""
    if isinstance(value, str) and all(one.isalnum() or one in "-_./" for one in value):
        return value
    return json.dumps(value, separators=(",", ":"))


def check_recipe(config: Config) -> None:
    """Raises `SettingError` for a recipe with a setting that verl's loss or loop cannot have."""
    HOST.check_recipe(config)
    # verl has several workers as a rule, and their number is not known here.
    HOST.check_alone(config, "with its workers")
    if config.run.tasks_per_update % config.learn.num_minibatches:
        raise SettingError(
            f"learn.num_minibatches: got {config.learn.num_minibatches}, expected a divisor of"
            f" run.tasks_per_update = {config.run.tasks_per_update} inside verl, whose minibatches"
            " have one size.",
            code="verl-minibatches",
        )
    if config.learn.schedule == "linear":
        raise SettingError(
            "learn.schedule: got 'linear', expected 'constant' or 'cosine' inside verl, which has"
            " no other.",
            code="verl-schedule",
        )
    loss = config.loss
    if loss.kl_coef and (config.credit.leaf_weight != "uniform" or not loss.learn_from_truncated):
        raise SettingError(
            f"loss.kl_coef: got {loss.kl_coef:g}, expected 0 inside verl beside unequal leaf"
            " weights (credit.leaf_weight, loss.learn_from_truncated = false): they are factors of"
            " the advantages there, which do not reach the KL term.",
            code="verl-leaf-weights",
        )


def check_arguments(config: Config, select: Callable[[str], Any]) -> None:
    """Raises `SettingError` for arguments of verl that have no meaning with trees, or that
    contradict the recipe; `treegraft verl-args` prints the right ones.

    Args:
        select: returns the value of an argument by its dotted name, None where it is missing.
    """

    def plain(name: str) -> Any:
        got = select(name)
        # OmegaConf's lists equal no other.
        return list(got) if name.endswith(".betas") and got is not None else got

    HOST.check_arguments(VERL, derived(config), plain)
