"""Law 1 with the credit of other papers' methods: a packed tree equals its trajectories apart."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from tests.policy.test_packed_equals_separate import OBJECTIVES as CORE
from tests.policy.test_packed_equals_separate import trees_for
from tests.support.families import build_model
from tests.support.slow_learner import (
    distance,
    example_trees,
    gradient_of,
    make_learner,
    slow_loss,
)
from tests.support.tiny import table_class

from treegraft.algo.advantages import assign_credit
from treegraft.core.types import BranchCause, Tree
from treegraft.extras.methods import appo
from treegraft.extras.methods.aepo_math import with_entropy_factors

APPO = table_class("loss")(
    aggregation="token-mean",
    clip_low=0.02,
    clip_high=0.02,
    dual_clip=3.0,
    future_weight=1.0,
)
OBJECTIVES = {**CORE, "appo": APPO}


@pytest.mark.parametrize("name", ["appo", "dapo", "gspo"])
def test_law_1_where_branches_teach_the_steps_above_them(name: str) -> None:
    model = build_model("llama")
    twin = build_model("llama")
    trees = [assign_credit(with_branches(tree), advantage=appo.APPO) for tree in example_trees(4)]
    assert any(step.advantage is not None for tree in trees for step in tree.steps)
    learner, descent = make_learner(model, OBJECTIVES[name])
    _, metrics = learner.learn(trees)
    slow = slow_loss(twin, trees, OBJECTIVES[name], 7.0)
    slow.backward()
    assert abs(metrics["learn/loss"] - float(slow.detach())) < 1e-6
    assert distance(descent.gradients[0], gradient_of(twin)) < 1e-5


def test_law_1_where_what_comes_after_weighs() -> None:
    """In the second epoch ratios are not 1: sums over what follows, distances that count results,
    and trajectories with two tokens past dual clip."""
    loss = APPO.model_copy(update={"dual_clip": 1.05})
    model = build_model("llama")
    twin = build_model("llama")
    trees = example_trees(4)
    start = copy.deepcopy(twin)
    learner, _ = make_learner(model, loss, 0.3, num_epochs=2)
    _, metrics = learner.learn(trees)
    for _ in range(2):
        twin.zero_grad()
        slow_loss(twin, trees, loss, 7.0, old=start).backward()
        with torch.no_grad():
            for weight in twin.parameters():
                weight -= 0.3 * weight.grad
    assert metrics["learn/ratio_max"] > 1.05
    ours, theirs, first = (
        torch.cat([w.detach().flatten() for w in m.parameters()]) for m in (model, twin, start)
    )
    assert distance(ours - first, theirs - first) < 1e-4


def with_branches(tree: Tree) -> Tree:
    """The tree, with every child but the first below a step that is not the root as a branch."""
    cause = BranchCause(entropy_change=1.0, probability=1.0, rule="test")
    steps = [
        replace(step, cause=cause) if step.depth > 1 and step.ordinals[-1] else step
        for step in tree.steps
    ]
    return replace(tree, steps=tuple(steps))


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
