"""An agent with a tool in TRL's trainer; see docs/trl.md."""

from treegraft.extras.trl import TreeGRPOTrainer, grpo_config

trainer = TreeGRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    args=grpo_config("recipe.toml", output_dir="out", save_steps=50),
    recipe="recipe.toml",
)
trainer.train()
trainer.save_model("agent")
