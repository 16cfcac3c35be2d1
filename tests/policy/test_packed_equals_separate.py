"""Laws 1 and 2: packed trees against trajectories trained apart, and branches that do not see each
other."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.families import PACKABLE, UNPACKABLE, build_model
from tests.support.slow_learner import (
    WAYS,
    assert_scores_equal,
    attend_by,
    distance,
    example_trees,
    gradient_of,
    make_learner,
    shift_weights,
    slow_loss,
)
from tests.support.trees import Part, build_tree, random_trees

from treegraft.algo.advantages import assign_credit
from treegraft.core.types import Status, Tree
from treegraft.policy.learn import learner as learner_module
from treegraft.policy.learn import scores as scores_module
from treegraft.policy.learn.pack import pack_trees
from treegraft.policy.learn.scores import token_scores
from treegraft.settings.policy import LossSettings

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture(params=WAYS)
def path_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    attend_by(request.param, monkeypatch)
    return str(request.param)


# ---------------------------------------------------------------------- law 1


@pytest.mark.parametrize("family", [*PACKABLE, *UNPACKABLE])
def test_law_1_scores_of_every_family(family: str, path_kind: str) -> None:
    model = build_model(family)
    before = model.config._attn_implementation
    assert (scores_module.packing_problem(model) is None) == (family in PACKABLE)
    if family in UNPACKABLE and path_kind != "gathered":
        pytest.skip("row by row there is one way")
    assert_scores_equal(model, pack_trees(example_trees(3)))
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("family", UNPACKABLE)
def test_what_cannot_be_packed_is_found_in_bfloat16_too(family: str) -> None:
    """By structure: rounding hides a small difference."""
    assert scores_module.packing_problem(build_model(family, dtype=torch.bfloat16)) is not None


def test_large_states_may_differ_by_more() -> None:
    """The limit is a share of the largest state: rounding grows with them."""
    model = build_model("llama")
    with torch.no_grad():
        model.model.norm.weight.mul_(1e5)
    assert scores_module.packing_problem(model) is None


def without_signs(tree: Tree) -> Tree:
    """The tree with the size of each advantage."""
    return replace(
        tree,
        leaves=tuple(replace(leaf, advantage=abs(leaf.advantage or 0.0)) for leaf in tree.leaves),
    )


@given(
    st.lists(random_trees(), min_size=1, max_size=3),
    st.sampled_from(WAYS),
    st.sampled_from(["token-mean", "sequence-mean"]),
)
@settings(max_examples=12, deadline=None)
def test_law_1_on_random_trees(trees: list[Tree], kind: str, aggregation: str) -> None:
    credited = [assign_credit(tree) for tree in trees]
    model = build_model("llama")
    twin = build_model("llama")
    batch = pack_trees(credited)
    with pytest.MonkeyPatch.context() as patch:
        attend_by(kind, patch)
        assert_scores_equal(model, batch)
        loss = LossSettings(aggregation=aggregation)  # type: ignore[arg-type]
        learner, descent = make_learner(model, loss)
        _, metrics = learner.learn(credited)
    expected = slow_loss(twin, credited, loss, 7.0)
    assert abs(metrics["learn/loss"] - float(expected.detach())) < 1e-6
    if expected.requires_grad:
        expected.backward()
        theirs = gradient_of(twin)
        # Opposite advantages on a shared token cancel: exactly in the packed sum, down to rounding
        # in the plain one. So the error is relative to the larger of the gradient and that of the
        # same tokens without signs.
        unsigned = build_model("llama")
        slow_loss(unsigned, [without_signs(tree) for tree in credited], loss, 7.0).backward()
        scale = max(float(theirs.norm()), float(gradient_of(unsigned).norm()))
        assert (descent.gradients[0] - theirs).norm() <= 1e-5 * scale + 1e-7


OBJECTIVES = {
    "grpo": LossSettings(aggregation="sequence-mean"),
    "dapo": LossSettings(aggregation="token-mean", clip_low=0.2, clip_high=0.28),
    "dr-grpo": LossSettings(aggregation="sequence-sum", length_constant=11),
    "grpo-kl": LossSettings(aggregation="sequence-mean", kl_coef=0.3),
    "entropy-bonus": LossSettings(aggregation="token-mean", entropy_coef=0.2),
    "dual-clip": LossSettings(
        aggregation="token-mean", clip_low=0.02, clip_high=0.02, dual_clip=1.05
    ),
    # The trees' sampling log-probabilities lie in [-1, 0], the model's near -4: ratios of .02 to
    # .3, of which the cap cuts some.
    "engine-corrected": LossSettings(aggregation="token-mean", engine_ratio_cap=0.04, kl_coef=0.1),
    "gspo": LossSettings(objective="gspo", clip_low=0.01, clip_high=0.02),
    "cispo": LossSettings(
        objective="cispo", aggregation="token-mean", clip_low=1.0, clip_high=0.02
    ),
    "ce-gppo": LossSettings(
        objective="gppo", aggregation="token-mean", clip_low=0.02, clip_high=0.02, kept_low=0.25
    ),
    "engine-corrected-sequence": LossSettings(
        aggregation="sequence-mean", engine_ratio="sequence", engine_ratio_cap=1.1
    ),
    "engine-old": LossSettings(aggregation="sequence-mean", old_logprobs="engine"),
}


BY_ENGINE = ("engine-corrected", "engine-corrected-sequence", "engine-old")


def trees_for(loss: LossSettings, model: Any, trees: list[Tree]) -> list[Tree]:
    """The trees, with log-probabilities of an engine near the model's where products of their
    ratios are taken or the clip acts on them: each off by up to 0.4 nats."""
    if loss.engine_ratio == "token" and loss.old_logprobs == "learner":
        return trees
    batch = pack_trees(trees)
    packed = torch.zeros(batch.num_tokens)
    noise = torch.rand(batch.sampled.numel(), generator=torch.Generator().manual_seed(0))
    packed[batch.sampled] = token_scores(model, batch)[0].detach() + 0.8 * noise - 0.4
    # Steps are packed in their own order.
    values = iter(packed.tolist())
    found = []
    for tree in trees:
        steps = []
        for step in tree.steps:
            own = tuple(itertools.islice(values, step.num_tokens))
            steps.append(replace(step, sampling_logprobs=own))
        found.append(replace(tree, steps=tuple(steps)))
    return found


@pytest.mark.parametrize("name", OBJECTIVES)
def test_law_1_gradients_of_the_published_objectives(
    name: str, path_kind: str, tmp_path: Path
) -> None:
    loss = OBJECTIVES[name]
    model = build_model("llama")
    twin = build_model("llama")
    trees = example_trees(3, advantage="dr_grpo" if name == "dr-grpo" else "grpo")
    trees = trees_for(loss, model, trees)
    learner, descent = make_learner(model, loss)
    if loss.kl_coef:
        # A reference that differs: the policy has moved since.
        learner.keep_reference(tmp_path, is_new=True)
        shift_weights(model)
        reference = copy.deepcopy(twin)
        shift_weights(twin)
    _, metrics = learner.learn(trees)
    expected = slow_loss(twin, trees, loss, 11.0, reference=reference if loss.kl_coef else None)
    expected.backward()
    assert abs(metrics["learn/loss"] - float(expected.detach())) < 1e-6
    assert distance(descent.gradients[0], gradient_of(twin)) < 1e-5


@pytest.mark.parametrize(
    ("name", "family"),
    [(name, "llama") for name in OBJECTIVES if name != "dr-grpo"]
    + [(name, "gemma2") for name in ("grpo", "dapo", "grpo-kl", "dual-clip", "engine-corrected")],
)
def test_law_1_over_minibatches_and_epochs(name: str, family: str, tmp_path: Path) -> None:
    """Two mini-batches, two epochs: ratios leave 1, clipping acts, old log-probabilities stay those
    of the start."""
    loss = OBJECTIVES[name]
    lr = 0.3
    trees = trees_for(loss, build_model(family), example_trees(4))
    model = build_model(family)
    twin = build_model(family)
    learner, _ = make_learner(model, loss, lr, num_minibatches=2, num_epochs=2)
    start = copy.deepcopy(twin)
    if loss.kl_coef:
        learner.keep_reference(tmp_path, is_new=True)
    _, metrics = learner.learn(trees)
    for _ in range(2):
        for part in (trees[:2], trees[2:]):
            twin.zero_grad()
            slow_loss(
                twin, part, loss, 7.0, old=start, reference=start if loss.kl_coef else None
            ).backward()
            with torch.no_grad():
                for weight in twin.parameters():
                    weight -= lr * weight.grad
    ours, theirs, first = (
        torch.cat([w.detach().flatten() for w in m.parameters()]) for m in (model, twin, start)
    )
    assert distance(ours - first, theirs - first) < 1e-4
    assert metrics["learn/clip_frac"] > 0.0
    assert metrics["learn/ratio_max"] > 1.02
    if loss.engine_ratio_cap is not None:
        assert 0.0 < metrics["learn/engine_capped_frac"] < 1.0
    assert metrics["learn/num_optimiser_steps"] == 4.0


def test_models_that_cannot_be_packed_learn_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    trees = example_trees(3)
    model = build_model("llama")
    twin = build_model("llama")
    learner, packed = make_learner(model)
    monkeypatch.setattr(learner_module, "packing_problem", lambda _: "it is said not to")
    fallback, rowwise = make_learner(twin)
    assert learner.packing_problem is None and fallback.packing_problem == "it is said not to"
    learner.learn(trees)
    fallback.learn(trees)
    assert distance(rowwise.gradients[0], packed.gradients[0]) < 1e-5


def test_a_linear_attention_model_learns_row_by_row() -> None:
    trees = example_trees(3)
    model = build_model("qwen3-next")
    twin = build_model("qwen3-next")
    learner, descent = make_learner(model)
    assert learner.packing_problem is not None and "1 of its 2 layers" in learner.packing_problem
    learner.learn(trees)
    slow_loss(twin, trees, LossSettings(), 7.0).backward()
    assert distance(descent.gradients[0], gradient_of(twin)) < 1e-5


def test_row_by_row_nothing_to_score_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_module, "packing_problem", lambda _: "it is said not to")
    batch = pack_trees([build_tree(Part.of("pp", Part("", status=Status.FAILED)))])
    assert [len(values) for values in token_scores(build_model("llama"), batch)] == [0, 0]


# ---------------------------------------------------------------------- law 2


def test_law_2_siblings_do_not_see_each_other(path_kind: str) -> None:
    """Other tokens in one branch, same length: every other branch's scores are equal to the last
    bit."""
    model = build_model("llama")
    part = Part.of("pppp", Part.of("sst", Part("sss"), Part("ss")), Part("ssss"), Part("s"))
    count = sum(len(step.token_ids) for step in build_tree(part).steps)
    tokens = [3 + (7 * n) % 90 for n in range(count)]
    changed = list(tokens)
    changed[7:10] = [50, 51, 52]  # 0.0.0: after 4 of the prompt and 3 of 0.0
    with torch.no_grad():
        first, second = (
            [batch.per_trajectory(values) for values in token_scores(model, batch)]
            for batch in (pack_trees([build_tree(part, tokens=ids)]) for ids in (tokens, changed))
        )
    for before, after in zip(first, second, strict=True):
        assert not torch.equal(before[0], after[0])
        assert torch.equal(before[0][:2], after[0][:2])
        for index in (1, 2, 3):
            assert torch.equal(before[index], after[index])


def test_law_2_nor_does_a_longer_sibling_matter(path_kind: str) -> None:
    model = build_model("llama")
    short = build_tree(Part.of("ppp", Part("ss"), Part("sss")), tokens=range(3, 99))
    long = build_tree(
        Part.of("ppp", Part("ss" + "s" * 40), Part("sss")),
        tokens=[*range(3, 8), *range(20, 60), 8, 9, 10],
    )
    with torch.no_grad():
        first, second = (pack_trees([tree]) for tree in (short, long))
        ours = first.per_trajectory(token_scores(model, first)[0])[1]
        theirs = second.per_trajectory(token_scores(model, second)[0])[1]
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
