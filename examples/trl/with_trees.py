"""An agent with a tool in TRL's trainer; see docs/trl.md. An argument names another model."""

import sys

import torch

from treegraft.extras.trl import TreeGRPOTrainer, grpo_config

cpu = {"use_cpu": not torch.cuda.is_available()}
trainer = TreeGRPOTrainer(
    model=([*sys.argv[1:], "Qwen/Qwen2.5-0.5B-Instruct"])[0],
    args=grpo_config("recipe.toml", output_dir="out", save_steps=50, **cpu),
    recipe="recipe.toml",
)
trainer.train()
trainer.save_model("agent")
