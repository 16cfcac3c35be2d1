"""An agent with a tool in TRL's trainer; see docs/trl.md."""

from calculator import correct, multiply
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    args=GRPOConfig(output_dir="out", num_generations=8, save_steps=50, max_steps=100),
    train_dataset=load_dataset("json", data_files="train.jsonl", split="train"),
    reward_funcs=[correct],
    tools=[multiply],
)
trainer.train()
trainer.save_model("agent")
