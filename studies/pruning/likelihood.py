"""Likelihoods of written steps under a model that is not trained: one packed pass, no sampling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from treegraft.core.team import Alone
from treegraft.core.types import Tree
from treegraft.policy.attention_hook import install_attention
from treegraft.policy.learn.pack import pack_trees
from treegraft.policy.learn.plan import by_step, gathered, plan_passes
from treegraft.policy.learn.scores import ScoringModel, packing_problem
from treegraft.policy.output_head import base_model
from treegraft.policy.weights import ModelWeights, plain_weights
from treegraft.settings.policy import LearnSettings


class Likelihood:
    """A model as a function from trees to the log-probabilities of their steps."""

    def __init__(self, model: Any, settings: LearnSettings) -> None:
        """Takes over `model`, whose attention becomes ours where that can be."""
        self._device = base_model(model).device
        self._limit = settings.max_pack_tokens
        self.packing_problem = packing_problem(model)
        """Why trees are run row by row; None where they are packed."""
        if self.packing_problem is None:
            install_attention(model)
        self.fingerprint = ModelWeights(plain_weights(model)).fingerprint
        """Checksum of the weights."""
        self._scoring = ScoringModel(model, is_packed=self.packing_problem is None)

    @torch.no_grad()
    def __call__(self, trees: Sequence[Tree]) -> list[dict[str, float]]:
        """Returns for each tree, by step, Σ log π(y) over the step's tokens of the agent, in nats
        at the temperature of the step; a tool's results are context."""
        plan = plan_passes(trees, range(len(trees)), self._limit, 1)
        columns = []
        for pack in plan.packs:
            batch = pack_trees([part.tree for part in pack], device=self._device)
            columns.append(self._scoring(batch)[0])
        found: list[dict[str, float]] = [{} for _ in trees]
        for n, step, values in by_step(plan, gathered(Alone(), plan, columns)):
            # Rounded once, so that a sum does not depend on its order.
            found[n][step.id] = math.fsum(values)
        return found
