"""What tests of trees inside TRL share: a recipe, and a trainer that compares each gradient with
our learner's. As a script it trains on the ranks that torchrun starts, and prints what they found.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tests.support.hosts import flat, own_gradient, recipe, recredited, with_failures
from tests.support.slow_learner import distance
from transformers import AutoModelForCausalLM, TrainerCallback

from treegraft import Config, Status, Tree
from treegraft.extras.trl import TreeGRPOTrainer, grpo_config
from treegraft.parts import GraftCause

QUIET = {
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
}


class Gap(NamedTuple):
    """One optimiser step in TRL against one of our learner, on the same trees and weights."""

    relative: float
    """‖g_TRL - g‖ / ‖g‖."""
    clipped: float
    """learn/clip_frac of our learner."""
    num_grafts: int
    num_failed: int
    num_truncated: int
    num_weights: int
    """Different leaf weights."""
    from_exact: float
    """‖g_TRL - g‖ / ‖g‖ for our learner's gradient in float32; of a float32 model `relative`."""
    own_from_exact: float
    """The same of our learner's gradient in the model's type."""


class Checked(TreeGRPOTrainer):  # type: ignore[misc]
    """Notes the gap of each optimiser step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gaps: list[Gap] = []
        # From its files: TRL has given the forward pass of its own model another shape.
        path = self.recipe.model.path
        dtype = self.recipe.model.dtype
        self._first = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        self._exact = None
        if dtype != "float32":
            self._exact = AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Any:
        plain = self.accelerator.unwrap_model(self.model)
        before = {name: w.clone() for name, w in plain.state_dict().items()}
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self._step % self.args.gradient_accumulation_steps:
            return loss
        config = self.recipe
        trees = self._of_update
        if self.state.global_step % self.num_iterations:
            # In a later pass the old log-probabilities are those of sampling, but for rounding.
            config = config.model_copy(
                update={"loss": config.loss.model_copy(update={"old_logprobs": "engine"})}
            )
        ours, metrics = own_gradient(self._first, trees, config, before)
        exact = ours
        if self._exact is not None:
            exact, _ = own_gradient(self._exact, trees, config, before)
        theirs = {name: w.grad for name, w in plain.named_parameters() if w.grad is not None}
        leaves = [leaf for tree in trees for leaf in tree.leaves]
        self.gaps.append(
            Gap(
                distance(*flat(theirs, ours)),
                metrics.get("learn/clip_frac", 0.0),
                sum(isinstance(step.cause, GraftCause) for tree in trees for step in tree.steps),
                sum(leaf.status is Status.FAILED for leaf in leaves),
                sum(leaf.status is Status.TRUNCATED for leaf in leaves),
                len({leaf.weight for leaf in leaves}),
                distance(*flat(theirs, exact)),
                distance(*flat(ours, exact)),
            )
        )
        return loss


def some_failed(trees: list[Tree], config: Config) -> list[Tree]:
    """The trees with a failed leaf in the first, which left a step without tokens, and the second
    failed as a whole; credited anew."""
    changed = [with_failures(trees[0], {1}), with_failures(trees[1], range(len(trees[1].leaves)))]
    return recredited(changed + trees[2:], config)


def train(config: Config, folder: Path, **own: Any) -> Checked:
    """A trainer that has trained."""
    args = grpo_config(config, output_dir=str(folder), **QUIET | own)
    trainer = Checked(None, config, args)
    trainer.train()
    return trainer


class Killed(TrainerCallback):  # type: ignore[misc]
    """Ends the process in the third update, before its optimiser step."""

    def on_pre_optimizer_step(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGKILL)


SAVES = {"save_strategy": "steps", "save_steps": 1}


if __name__ == "__main__":
    torch.set_num_threads(1)
    base, folder, *overrides = sys.argv[1:]
    if overrides[-1] == "killed":
        config = recipe(base, *overrides[:-1])
        args = grpo_config(config, output_dir=folder, **QUIET | SAVES)
        TreeGRPOTrainer(None, config, args, callbacks=[Killed()]).train()
    done = train(recipe(base, *overrides), Path(folder))
    if done.accelerator.is_main_process:
        for gap in done.gaps:
            print("GAP", gap.relative, len(done.trees), len(done._of_update))
