"""An agent with a tool in TRL's trainer; see docs/trl.md. An argument names another model."""

import sys

import torch
from calculator import correct, multiply
from datasets import load_dataset

from treegraft.extras.trl import TreeGRPOTrainer, grpo_config

cpu = {"use_cpu": not torch.cuda.is_available()}
trainer = TreeGRPOTrainer(
    recipe="recipe.toml",
    model=([*sys.argv[1:], "Qwen/Qwen2.5-0.5B-Instruct"])[0],
    args=grpo_config("recipe.toml", output_dir="out", save_steps=50, **cpu),
    train_dataset=load_dataset("json", data_files="train.jsonl", split="train"),
    reward_funcs=[correct],
    tools=[multiply],
)
trainer.train()
trainer.save_model("agent")
