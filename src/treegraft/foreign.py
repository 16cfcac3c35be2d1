"""Names of settings in other frameworks, for the error that names ours."""

from __future__ import annotations

from collections.abc import Mapping

FOREIGN_NAMES: Mapping[str, str] = {
    "adam_beta1": "learn.betas",
    "adam_beta2": "learn.betas",
    "beta": "loss.kl_coef",
    "bf16": "model.dtype",
    "cliprange": "loss.clip_low and loss.clip_high",
    "clip_ratio": "loss.clip_low and loss.clip_high",
    "clip_ratio_high": "loss.clip_high",
    "clip_ratio_low": "loss.clip_low",
    "epsilon": "loss.clip_low",
    "epsilon_high": "loss.clip_high",
    "eval_steps": "eval.every",
    "gradient_accumulation_steps": "learn.max_pack_tokens",
    "group_size": "explore.num_leaves",
    "kl_loss_coef": "loss.kl_coef",
    "learning_rate": "learn.lr",
    "lora_alpha": "model.lora.alpha",
    "lora_r": "model.lora.rank",
    "loss_agg_mode": "loss.aggregation",
    "loss_type": "loss.aggregation",
    "max_completion_length": "rollout.max_completion_tokens",
    "max_response_length": "rollout.max_completion_tokens",
    "max_steps": "run.num_updates or rollout.max_agent_steps",
    "max_tool_calling_iterations": "rollout.max_tool_calls",
    "max_turns": "rollout.max_agent_steps",
    "model_name_or_path": "model.path",
    "num_generations": "explore.num_leaves",
    "num_iterations": "learn.num_epochs",
    "output_dir": "run.dir",
    "ppo_epochs": "learn.num_epochs",
    "ppo_mini_batch_size": "learn.num_minibatches",
    "report_to": "track.trackers",
    "reward_funcs": "reward.funcs",
    "reward_weights": "reward.weights",
    "rollout_n": "explore.num_leaves",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "scale_rewards": "credit.advantage",
    "total_training_steps": "run.num_updates",
    "train_batch_size": "run.tasks_per_update",
    "warmup_steps": "learn.lr_warmup_steps",
}
"""Names that users of other frameworks type, and ours."""
