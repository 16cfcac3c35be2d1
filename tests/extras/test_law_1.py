"""Law 1 with the credit of other papers' methods: a packed tree equals its trajectories apart."""

from __future__ import annotations

import pytest
from tests.policy.test_packed_equals_separate import OBJECTIVES, trees_for
from tests.support.families import build_model
from tests.support.slow_learner import (
    distance,
    example_trees,
    gradient_of,
    make_learner,
    slow_loss,
)

from treegraft.extras.methods.aepo_math import with_entropy_factors


@pytest.mark.parametrize("name", OBJECTIVES)
def test_law_1_with_a_factor_for_each_token(name: str) -> None:
    loss = OBJECTIVES[name]
    model = build_model("llama")
    twin = build_model("llama")
    trees = with_entropy_factors(example_trees(3), weight=0.7)
    assert any(step.credit_factors is not None for tree in trees for step in tree.steps)
    trees = trees_for(loss, model, trees)
    # Without a reference, whose term has no advantage.
    loss = loss.model_copy(update={"kl_coef": 0.0})
    learner, descent = make_learner(model, loss)
    _, metrics = learner.learn(trees)
    slow = slow_loss(twin, trees, loss, 11.0 if name == "dr-grpo" else 7.0)
    slow.backward()
    assert abs(metrics["learn/loss"] - float(slow.detach())) < 1e-6
    assert distance(descent.gradients[0], gradient_of(twin)) < 1e-5
