"""Law 3 and the status table: the weight of a token depends on leaves and denominators, never on
packs."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from tests.support.families import build_model
from tests.support.slow_learner import (
    distance,
    example_trees,
    gradient_of,
    make_learner,
    shift_weights,
    slow_loss,
)
from tests.support.trees import Part, build_tree

from treegraft.algo.advantages import assign_credit
from treegraft.algo.loss import PassScores
from treegraft.core.types import Status
from treegraft.policy.learn.metrics import MetricSums
from treegraft.policy.learn.pack import split_tree
from treegraft.settings.policy import LossSettings

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.mark.parametrize("leaf_weight", ["uniform", "inverse_branching"])
@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "sequence-sum"])
def test_law_3_packing_changes_no_weight(leaf_weight: str, aggregation: str) -> None:
    trees = example_trees(4, leaf_weight=leaf_weight)
    gradients = []
    for max_pack_tokens in (64, 8192):  # 64: nearly every tree a pack of its own
        learner, descent = make_learner(
            build_model("llama"),
            LossSettings(aggregation=aggregation),  # type: ignore[arg-type]
            max_pack_tokens=max_pack_tokens,
        )
        learner.learn([*trees, *trees])
        gradients.append(descent.gradients[0])
    assert distance(gradients[0], gradients[1]) < 1e-6


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "sequence-sum"])
def test_a_tree_too_large_for_memory_is_split_without_changing_the_gradient(
    aggregation: str,
) -> None:
    """12 tokens at once: trees in several parts, also over several optimiser steps; what is
    recorded is the same too."""
    trees = example_trees(4)
    results = []
    for max_pack_tokens in (12, 8192):
        learner, descent = make_learner(
            build_model("llama"),
            LossSettings(aggregation=aggregation),  # type: ignore[arg-type]
            max_pack_tokens=max_pack_tokens,
            num_epochs=2,
        )
        assert max_pack_tokens > 12 or any(len(split_tree(tree, 12)) > 1 for tree in trees)
        results.append((descent.gradients, *learner.learn(trees)))
    (ours, our_trees, our_metrics), (whole, whole_trees, metrics) = results
    assert [distance(a, b) < 1e-6 for a, b in zip(ours, whole, strict=True)] == [True, True]
    assert our_metrics["learn/loss"] == pytest.approx(metrics["learn/loss"], abs=1e-6)
    assert our_metrics["learn/num_contributions"] == metrics["learn/num_contributions"]
    assert our_metrics["learn/num_unique_tokens"] > metrics["learn/num_unique_tokens"]
    for ours_tree, whole_tree in zip(our_trees, whole_trees, strict=True):
        for a, b in zip(ours_tree.steps, whole_tree.steps, strict=True):
            assert (a.old_logprobs is None) == (b.old_logprobs is None)
            if a.old_logprobs is not None:
                assert a.old_logprobs == pytest.approx(b.old_logprobs, abs=1e-5)
                assert a.ratios == pytest.approx(b.ratios, abs=1e-4)


def test_law_3_a_shared_token_weighs_what_the_leaves_below_it_weigh() -> None:
    """With equal lengths and sequence-mean, the loss's derivative after a shared token's
    log-probability is Σ w_i A_i / |y_i|."""
    tree = assign_credit(
        build_tree(
            Part.of(
                "pp",
                Part.of("s", Part("s", reward=1.0), Part("s", reward=0.0)),
                Part("ss", reward=0.0),
            )
        )
    )
    learner, _ = make_learner(build_model("llama"))
    _, batch = next(learner._batches(learner._plan([tree], (0,))))
    logprobs = torch.full((5,), -2.0, requires_grad=True)
    scores = PassScores(
        logprobs=logprobs,
        entropies=torch.zeros(5),
        old_logprobs=logprobs.detach(),
        imitated_logprobs=torch.zeros(0),
    )
    loss = learner._pack_loss(batch, scores, learner._denominators([tree]), MetricSums())
    loss.backward()
    # Rewards 1, 0, 0: mean 1/3, deviation 1/sqrt(3); A = 2/sqrt(3), -1/sqrt(3) twice; w = 1/3, |y|
    # = 2.
    unit = 1 / math.sqrt(3) / 6
    expected = [-(2 - 1) * unit, -2 * unit, unit, unit, unit]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(expected, rel=1e-5)


def test_failed_leaves_have_no_part_in_loss_or_denominator() -> None:
    """With a failed trajectory beside them, two others learn as if it had never been."""
    live = (Part("sss", reward=1.0), Part("ss", reward=0.0))
    with_failed = build_tree(
        Part.of("pp", *live, Part("ssssss", status=Status.FAILED)), tokens=range(3, 99)
    )
    without = build_tree(Part.of("pp", *live), tokens=range(3, 99))
    for aggregation in ("token-mean", "sequence-mean", "sequence-sum"):
        gradients = []
        for tree in (with_failed, without):
            learner, descent = make_learner(
                build_model("llama"), LossSettings(aggregation=aggregation)
            )  # type: ignore[arg-type]
            learner.learn([assign_credit(tree)])
            gradients.append(descent.gradients[0])
        assert distance(gradients[0], gradients[1]) < 1e-5


def test_truncated_leaves_keep_their_place_in_the_denominator() -> None:
    """Status table: in group and denominators; their loss is a setting. Here |y| = 3 and 2, w =
    1/2: the denominator is 5/2."""
    tree = build_tree(
        Part.of("pp", Part("sss", reward=1.0), Part("ss", reward=-1.0, status=Status.TRUNCATED))
    )
    learner, _ = make_learner(build_model("llama"), LossSettings(aggregation="token-mean"))
    for learns in (True, False):
        credited = assign_credit(tree, learn_from_truncated=learns)
        assert learner._denominators([credited]).weighted_tokens == pytest.approx(2.5)
    _, metrics = learner.learn([credited])
    assert metrics["learn/num_contributions"] == 3.0


def test_groups_without_variance_are_skipped_but_counted() -> None:
    flat = example_trees(2)[1]
    mixed = example_trees(1)[0]
    for aggregation in ("token-mean", "sequence-mean"):
        loss = LossSettings(aggregation=aggregation)  # type: ignore[arg-type]
        model = build_model("llama")
        twin = build_model("llama")
        learner, descent = make_learner(model, loss)
        learned, metrics = learner.learn([mixed, flat])
        slow_loss(twin, [mixed, flat], loss, 7.0).backward()
        assert distance(descent.gradients[0], gradient_of(twin)) < 1e-5
        assert metrics["learn/skipped_groups_frac"] == 0.5
        assert metrics["learn/num_unique_tokens"] == sum(
            len(step.token_ids) for step in mixed.steps
        )
        assert learned[1] == flat and learned[0].steps[1].old_logprobs is not None
    # In a minibatch of its own it takes no step, and the means are over the other's.
    learner, descent = make_learner(build_model("llama"), num_minibatches=2)
    _, metrics = learner.learn([mixed, flat])
    assert metrics["learn/num_optimiser_steps"] == 1.0
    norm = sum(float((part**2).sum()) for part in descent.gradients[0]) ** 0.5
    assert metrics["learn/grad_norm"] == pytest.approx(norm)
    # Alone there is nothing to learn: no step, no error.
    learner, descent = make_learner(build_model("llama"))
    _, metrics = learner.learn([flat])
    assert metrics["learn/skipped_groups_frac"] == 1.0 and not descent.gradients[0].any()
    assert metrics["learn/loss"] == metrics["learn/num_optimiser_steps"] == 0.0


def test_with_a_divergence_term_flat_groups_are_learned_from(tmp_path: Path) -> None:
    flat = example_trees(2)[1]
    model = build_model("llama")
    twin = build_model("llama")
    loss = LossSettings(kl_coef=0.5)
    learner, descent = make_learner(model, loss)
    learner.keep_reference(tmp_path, is_new=True)
    reference = copy.deepcopy(twin)
    shift_weights(model)
    shift_weights(twin)
    _, metrics = learner.learn([flat])
    slow_loss(twin, [flat], loss, 7.0, reference=reference).backward()
    assert distance(descent.gradients[0], gradient_of(twin)) < 1e-5
    assert metrics["learn/kl"] > 0


def test_with_an_entropy_bonus_flat_groups_are_learned_from() -> None:
    """One descent step on the bonus alone raises the entropy; a negative weight lowers it."""
    flat = example_trees(2)[1]
    for coef, sign in ((0.5, 1), (-0.5, -1)):
        model = build_model("llama")
        twin = build_model("llama")
        learner, descent = make_learner(model, LossSettings(entropy_coef=coef), 0.1)
        _, before = learner.learn([flat])
        slow_loss(twin, [flat], LossSettings(entropy_coef=coef), 7.0).backward()
        assert distance(descent.gradients[0], gradient_of(twin)) < 1e-5
        _, after = learner.learn([flat])
        assert sign * (after["learn/entropy"] - before["learn/entropy"]) > 0
        assert before["learn/loss"] == pytest.approx(-coef * before["learn/entropy"], rel=0.2)
