"""Law 19: rows of trees, learned one by one in plain torch, give the loss and the gradient of our
learner on packed trees."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.error_codes import raises_code
from tests.support.families import build_model
from tests.support.slow_learner import FLAT, distance, gradient_of, make_learner
from tests.support.trees import Part, build_tree

from treegraft.core.types import Origin, Status, StoredCause, Tree
from treegraft.policy.learn.credit import credit_trees
from treegraft.policy.learn.pack import pack_trees
from treegraft.policy.learn.rows import LeafRow, leaf_rows
from treegraft.settings.config import Config
from treegraft.settings.load import load_config
from treegraft.settings.policy import LossSettings

CONSTANT = 7.0
"""The divisor of "sequence-sum" in `make_learner`."""
BELOW_A_GRAFT = Part.of("sst", Part("ss", reward=1.0), Part("sSs", reward=0.0))
PARTS = [
    Part.of(
        "ppppp",
        Part.of("sst", Part.of("rrr", BELOW_A_GRAFT), Part("sss", reward=0.25, temperature=0.7)),
        Part("ssss", reward=1.0),
        Part.of("st", Part("", status=Status.FAILED)),
        Part("ss", reward=-1.0, status=Status.TRUNCATED),
        Part("s", reward=-1.0, status=Status.FORMAT_VIOLATION),
    ),
    FLAT,
    Part.of("ppp", Part.of("stst", Part("s", reward=1.0), Part("ssss")), Part("ss", reward=0.25)),
    # A group that has failed as a whole.
    Part.of("pp", Part("s", status=Status.FAILED), Part("", status=Status.FAILED)),
]
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "grpo": {"loss": {"shaping_weight": 0.0}, "credit": {"retrieval_weight": 0.0}},
    "arpo-soft": {"credit": {"attribution": "soft", "retrieval_weight": 0.0}},
    "arpo-hard": {"credit": {"attribution": "hard", "retrieval_weight": 0.0}},
    # 1 + m F is above the upper end of the clip at ratio 1.
    "rapo": {"loss": {"shaping_weight": 2.0, "clip_high": 0.28}},
    "rapo-hard-weighted": {
        "loss": {"shaping_weight": 0.6},
        "credit": {"attribution": "hard", "leaf_weight": "inverse_branching"},
    },
    "truncated": {"loss": {"learn_from_truncated": False}},
}
AGGREGATIONS = ("token-mean", "sequence-mean", "sequence-sum")


def config_of(name: str, aggregation: str, **loss: Any) -> Config:
    tables = CASES[name]
    given = {"aggregation": aggregation, "graft_coef": 0.0, **tables.get("loss", {}), **loss}
    return load_config({**tables, "loss": given})


def trees_of(config: Config) -> list[Tree]:
    built = [build_tree(part, task_id=f"t/{n}", seed=n) for n, part in enumerate(PARTS)]
    return credit_trees(built, config)


# ---------------------------------------------------------------------- a learner that knows rows


def row_logprobs(model: Any, row: LeafRow) -> torch.Tensor:
    """[T] of the completion, by a forward pass of this row alone."""
    ids = torch.tensor([row.prompt_ids + row.completion_ids])
    start = len(row.prompt_ids)
    logits = model(input_ids=ids, use_cache=False).logits[0, start - 1 : -1].float()
    scaled = logits / torch.tensor(row.temperatures)[:, None]
    return torch.log_softmax(scaled, -1).gather(1, ids[0, start:, None])[:, 0]


def rows_loss(
    model: Any, rows: Sequence[LeafRow], loss: LossSettings, old: Any = None
) -> torch.Tensor:
    """The equation of `leaf_rows`; `old` is a frozen model, None takes the present one."""
    num_groups = len({row.group_id for row in rows})
    whole = {(row.group_id, row.leaf_id): row.weight * row.num_denominator for row in rows}
    num_tokens = sum(whole.values())
    total = torch.zeros(())
    for row in rows:
        if not any(row.loss_mask):
            continue
        factor = {
            "token-mean": row.weight / num_tokens,
            "sequence-mean": row.weight / (row.num_denominator * num_groups),
            "sequence-sum": row.weight / (CONSTANT * num_groups),
        }[loss.aggregation]
        new = row_logprobs(model, row)
        with torch.no_grad():
            before = new.detach() if old is None else row_logprobs(old, row)
            if loss.old_logprobs == "engine":
                before = torch.tensor(row.sampling_logprobs)
        ratios = row.shaping * torch.exp(new - before)
        advantages = torch.tensor(row.advantages)
        clipped = ratios.clamp(1 - loss.clip_low, 1 + loss.clip_high)
        terms = -torch.minimum(ratios * advantages, clipped * advantages)
        total = total + factor * (terms * torch.tensor(row.loss_mask)).sum()
    return total


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", CASES)
def test_law_19_rows_give_the_loss_and_gradient_of_packed_trees(
    name: str, aggregation: str
) -> None:
    config = config_of(name, aggregation)
    trees = trees_of(config)
    model = build_model("llama")
    twin = build_model("llama")
    learner, descent = make_learner(model, config.loss)
    _, metrics = learner.learn(trees)
    expected = rows_loss(twin, leaf_rows(trees, config), config.loss)
    expected.backward()
    assert abs(metrics["learn/loss"] - float(expected.detach())) < 1e-6
    assert distance(descent.gradients[0], gradient_of(twin)) < 1e-5
    assert (metrics["learn/clip_frac"] > 0) == (name == "rapo")


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_law_19_away_from_the_old_policy(aggregation: str) -> None:
    """Two passes over the same trees: in the second, ratios are off 1 and the clip cuts some."""
    config = config_of("rapo-hard-weighted", aggregation, clip_low=0.05, clip_high=0.05)
    trees = trees_of(config)
    lr = 0.3
    model = build_model("llama")
    twin = build_model("llama")
    learner, descent = make_learner(model, config.loss, lr, num_epochs=2)
    _, metrics = learner.learn(trees)
    start = copy.deepcopy(twin)
    for ours in descent.gradients:
        twin.zero_grad()
        rows_loss(twin, leaf_rows(trees, config), config.loss, start).backward()
        assert distance(ours, gradient_of(twin)) < 1e-5
        with torch.no_grad():
            for weight in twin.parameters():
                weight -= lr * weight.grad
    assert metrics["learn/clip_frac"] > 0 and metrics["learn/ratio_max"] > 1.05


def test_law_19_by_the_log_probabilities_of_the_engine() -> None:
    config = config_of("arpo-hard", "token-mean", old_logprobs="engine", clip_low=0.97)
    trees = trees_of(config)
    model = build_model("llama")
    twin = build_model("llama")
    learner, descent = make_learner(model, config.loss)
    learner.learn(trees)
    rows_loss(twin, leaf_rows(trees, config), config.loss).backward()
    assert distance(descent.gradients[0], gradient_of(twin)) < 1e-5


# ---------------------------------------------------------------------- rows against trees


def test_rows_by_hand() -> None:
    """A group of two, and one that failed. Rewards 1 and 0 have the mean 1/2 and the standard
    deviation 1 / √2 (of n - 1), so their advantages are ± 1 / √2."""
    part = Part.of(
        "pp",
        Part.of("sst", Part("s", reward=1.0), Part("sS", reward=0.0)),
        Part("ss", status=Status.FAILED),
    )
    config = load_config({"loss": {"graft_coef": 0.0}, "credit": {"attribution": "hard"}})
    first, second = leaf_rows(credit_trees([build_tree(part)], config), config)
    assert (first.leaf_id, second.leaf_id) == ("0.0.0", "0.0.1")
    assert first.group_id == second.group_id == "0/t/1"
    assert first.weight == second.weight == 0.5
    assert first.origins == [Origin.POLICY] * 2 + [Origin.TOOL, Origin.POLICY]
    assert second.loss_mask == [True, True, False, True, False]
    assert (first.num_denominator, second.num_denominator) == (3, 3)
    # The step above both learns with the mean of both.
    assert first.advantages == pytest.approx([0, 0, 0, 0.5**0.5], abs=1e-5)
    assert second.advantages == pytest.approx([0, 0, 0, -(0.5**0.5), -(0.5**0.5)], abs=1e-5)
    assert (first.reward, second.reward) == (1.0, 0.0) and first.shaping == 1.0


def with_factors(tree: Tree) -> Tree:
    """Credit by token: factors that differ, as AEPO's do."""
    return replace(
        tree,
        steps=tuple(
            replace(step, credit_factors=tuple(0.5 + n for n in range(len(step.token_ids))))
            for step in tree.steps
        ),
    )


LISTS = (
    "completion_ids",
    "loss_mask",
    "advantages",
    "sampling_logprobs",
    "temperatures",
    "origins",
)


def test_a_stored_trajectory_counts_with_what_its_agent_wrote() -> None:
    tree = build_tree(Part.of("pp", Part("ss", reward=1.0), Part("rrr", lesson=2)))
    stored = replace(tree.steps[2], cause=StoredCause(source="expert", reward=1.0))
    tree = replace(tree, steps=(*tree.steps[:2], stored))
    config = load_config({"loss": {"graft_coef": 0.0}})
    own, other = leaf_rows(credit_trees([tree], config), config)
    assert (own.num_denominator, other.num_denominator) == (2, 2)
    assert not any(other.loss_mask) and pack_trees([tree]).lengths.tolist() == [2.0, 2.0]


def test_imitation_is_refused_where_there_is_something_to_imitate() -> None:
    config = load_config({"loss": {"graft_coef": 0.5}})
    plain, grafted = (
        build_tree(Part.of("pp", Part.of("s", Part.of("rr", Part("s"), lesson=lesson)), Part("s")))
        for lesson in (0, 2)
    )
    assert len(leaf_rows(credit_trees([plain], config), config)) == 2
    with raises_code("grafts-in-rows"):
        leaf_rows(credit_trees([grafted], config), config)


def test_rows_are_made_without_torch() -> None:
    code = "import sys, treegraft.policy.learn.rows; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"
