"""What tests of trees inside other trainers share: an agent, a recipe, failed leaves, and the
gradient of our learner."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tests.support.slow_learner import gradients_of
from tests.support.tiny import tiny

from treegraft import Config, Status, Tree, load_config, train
from treegraft.parts import Learner
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
    "reward": {"funcs": ["tests.support.tiny_parts:by_text"]},
    "loss": {"graft_coef": 0.0},
    "learn": {"num_minibatches": 1, "lr": 1e-2},
}
"""ARPO and RAPO, with rewards that differ in every tree."""


def recipe(base: Path | str, *overrides: str) -> Config:
    """The settings of a training that begins with the model at `base`."""
    return load_config(tiny(**RAPO | {"model": {"path": str(base)}}), overrides)


def warmed_up(folder: Path, num_steps: int = 60) -> Path:
    """An agent that has learned a little: it searches, and answers too early; after fewer steps it
    is less sure of what it writes."""
    tables = tiny(
        run={"num_updates": 0, "dir": str(folder), "name": "base"},
        model={"tiny": {"max_context": 160}},
        eval={"every": 0, "at_start": False, "at_end": False},
        warmup={"num_steps": num_steps},
    )
    return train(tables, display=False).checkpoint_dir


def on_one_thread() -> Iterator[None]:
    """Holds torch on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def with_failures(tree: Tree, places: Collection[int]) -> Tree:
    """The tree with failed leaves, without credit."""
    leaves = tuple(
        replace(leaf, status=Status.FAILED, reward=None, error="lost") if place in places else leaf
        for place, leaf in enumerate(tree.leaves)
    )
    return replace(tree, leaves=leaves)


def own_gradient(
    model: Any,
    trees: Sequence[Tree],
    config: Config,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> tuple[dict[str, torch.Tensor], Mapping[str, float]]:
    """The gradient of one step of our learner, and its metrics.

    Args:
        model: the reference of the KL term; it stays as it is.
        weights: to take the gradient at; None for those of the model.
    """
    learner = Learner(
        copy.deepcopy(model),
        config.learn.model_copy(update={"num_minibatches": 1, "num_epochs": 1}),
        config.loss,
        length_constant=config.rollout.max_completion_tokens,
    )
    if config.loss.kl_coef:
        learner.keep_reference()
    if weights is not None:
        learner.model.load_state_dict(weights)
    found: dict[str, torch.Tensor] = {}

    def step(*_: Any) -> float:
        found.update({name: w.clone() for name, w in gradients_of(learner.optimiser).items()})
        return 0.0

    learner.optimiser.step = step  # type: ignore[method-assign]
    _, metrics = learner.learn(list(trees))
    return found, metrics


def flat(
    theirs: Mapping[str, torch.Tensor], ours: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two gradients as vectors; where ours has nothing to learn from, it is 0."""
    pairs = [(w, ours.get(name, torch.zeros_like(w))) for name, w in theirs.items()]
    one, other = (torch.cat([w.flatten() for w in side]) for side in zip(*pairs, strict=True))
    return one, other


def recredited(trees: Sequence[Tree], config: Config) -> list[Tree]:
    """The trees, credited anew."""
    return credit_trees(list(trees), config)
