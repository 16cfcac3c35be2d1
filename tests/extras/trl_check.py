"""What tests of trees inside TRL share: a recipe, and a trainer that compares each gradient with
our learner's. As a script it trains on the ranks that torchrun starts, and prints what they found.
"""

from __future__ import annotations

import copy
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tests.slow_learner import distance
from tests.tiny import tiny
from transformers import AutoModelForCausalLM, TrainerCallback

from treegraft import Config, Status, Tree, load_config
from treegraft.extras.trl import TreeGRPOTrainer, grpo_config
from treegraft.parts import GraftCause, Learner
from treegraft.policy.learn.credit import credit_trees

RAPO: Mapping[str, Any] = {
    "run": {"num_updates": 2, "tasks_per_update": 2, "seed": 11},
    "warmup": {"num_steps": 0},
    "explore": {
        "explorers": ["entropy", "graft"],
        "num_leaves": 4,
        "entropy": {"num_starts": 2, "base_prob": 0.9},
        "graft": {"num_hybrid": 3, "probability": 1.0},
    },
    "buffer": {"path": "expert", "encoder": "hashing", "terminal": "exclude"},
    "reward": {"funcs": ["tests.tiny_parts:by_text"]},
    "loss": {"graft_coef": 0.0},
    "learn": {"num_minibatches": 1, "lr": 1e-2},
}
"""ARPO and RAPO, with rewards that differ in every tree."""
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
    num_imitated: int
    """Texts."""


def recipe(base: Path | str, *overrides: str) -> Config:
    """The settings of a training that begins with the model at `base`."""
    return load_config(tiny(**RAPO | {"model": {"path": str(base)}}), overrides)


def own_gradient(
    weights: Mapping[str, Any],
    trees: list[Tree],
    config: Config,
    reference: Any,
    lessons: list[Tree],
) -> tuple[dict[str, torch.Tensor], float]:
    """The gradient of our learner at these weights, and the share of clipped tokens."""
    learn = config.learn.model_copy(update={"num_epochs": 1})
    learner = Learner(
        copy.deepcopy(reference),
        learn,
        config.loss,
        length_constant=config.rollout.max_completion_tokens,
    )
    if config.loss.kl_coef:
        learner.freeze_reference()
    learner.model.load_state_dict(weights)
    found: dict[str, torch.Tensor] = {}

    def step(*_: Any) -> float:
        pairs = learner.model.named_parameters()
        found.update({name: w.grad.clone() for name, w in pairs if w.grad is not None})
        return 0.0

    learner.optimiser.step = step  # type: ignore[method-assign]
    _, metrics = learner.learn(trees, lessons)
    return found, metrics.get("learn/clip_frac", 0.0)


class Checked(TreeGRPOTrainer):  # type: ignore[misc]
    """Notes the gap of each optimiser step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gaps: list[Gap] = []
        # From its files: TRL has given the forward pass of its own model another shape.
        self._first = AutoModelForCausalLM.from_pretrained(self.recipe.model.path).eval()

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Any:
        plain = self.accelerator.unwrap_model(self.model)
        before = {name: w.clone() for name, w in plain.state_dict().items()}
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self._step % self.args.gradient_accumulation_steps:
            return loss
        config, trees = self.recipe, self._of_update
        if self.state.global_step % self.num_iterations:
            # In a later pass the old log-probabilities are those of sampling, but for rounding.
            config = config.model_copy(
                update={"loss": config.loss.model_copy(update={"old_logprobs": "engine"})}
            )
        ours, clipped = own_gradient(before, trees, config, self._first, self._lessons)
        theirs = {name: w.grad for name, w in plain.named_parameters() if w.grad is not None}
        # Without anything to learn from, ours has none.
        pairs = [(w, ours.get(name, torch.zeros_like(w))) for name, w in theirs.items()]
        flat = [torch.cat([one.flatten() for one in side]) for side in zip(*pairs, strict=True)]
        leaves = [leaf for tree in trees for leaf in tree.leaves]
        self.gaps.append(
            Gap(
                distance(*flat),
                clipped,
                sum(isinstance(step.cause, GraftCause) for tree in trees for step in tree.steps),
                sum(leaf.status is Status.FAILED for leaf in leaves),
                sum(leaf.status is Status.TRUNCATED for leaf in leaves),
                len({leaf.weight for leaf in leaves}),
                len(self._texts),
            )
        )
        return loss


def with_failures(trees: list[Tree], config: Config) -> list[Tree]:
    """The trees with a failed leaf in the first, which left a step without tokens, and the second
    failed as a whole; credited anew."""

    def failed(tree: Tree, places: range) -> Tree:
        names = {tree.leaves[place].step_id for place in places}
        leaves = tuple(
            replace(leaf, status=Status.FAILED, reward=None, error="lost")
            if leaf.step_id in names
            else leaf
            for leaf in tree.leaves
        )
        return replace(tree, leaves=leaves)

    changed = [failed(trees[0], range(1, 2)), failed(trees[1], range(len(trees[1].leaves)))]
    return credit_trees(changed + trees[2:], config)


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
