"""Laws 1 to 3: packed trees against trajectories trained apart, by an independent slow
implementation of each objective."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.families import PACKABLE, UNPACKABLE, build_model
from tests.trees import Part, build_tree, random_trees
from torch.nn.attention.flex_attention import flex_attention

from treegraft.algo.advantages import assign_credit
from treegraft.core.errors import ModelError
from treegraft.core.types import LEARNING_RULES, Origin, Status, Trajectory, Tree
from treegraft.policy.learn import learner as learner_module
from treegraft.policy.learn import scores as scores_module
from treegraft.policy.learn.learner import Learner, plain_weights, split_evenly, token_scores
from treegraft.policy.learn.optimiser import MasterAdamW
from treegraft.policy.learn.pack import TreeBatch, pack_trees, split_tree
from treegraft.policy.learn.tree_attention import PackedPlan
from treegraft.policy.load import with_adapters
from treegraft.settings.policy import LearnSettings, LoraSettings, LossSettings, ModelSettings

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

Weights = list[torch.Tensor]

BRANCHING = Part.of(
    "ppppp",
    Part.of(
        "sstt",
        Part.of(
            "sstrf",
            Part("ss", reward=1.0),
            Part("sSs", reward=0.0),
            Part("s", reward=-1.0, status=Status.TRUNCATED),
        ),
        Part("sss", reward=0.25, temperature=0.7),
        temperature=1.3,
    ),
    Part("ssss", reward=1.0),
    Part.of("st", Part("", status=Status.FAILED)),
    Part("ss", reward=-1.0, status=Status.FORMAT_VIOLATION),
)
FLAT = Part.of("pp", Part("sss", reward=0.5), Part("s", reward=0.5))
"""A group without variance."""


def example_trees(count: int = 2, **credit: Any) -> list[Tree]:
    parts = [
        BRANCHING,
        FLAT,
        Part.of("ppp", Part("sts", reward=1.0), Part("ss", reward=0.0)),
        BRANCHING,
    ][:count]
    return [
        assign_credit(build_tree(part, task_id=f"t/{n}", seed=n), **credit)
        for n, part in enumerate(parts)
    ]


# ---------------------------------------------------------------------- the slow way


def plain_scores(model: Any, path: Trajectory) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of a trajectory's sampled tokens, from its own forward pass
    with whole logits."""
    temperatures = [step.temperature or 1.0 for step in path.steps for _ in step.token_ids]
    logits = model(input_ids=torch.tensor([path.token_ids]), use_cache=False).logits[0].float()
    logprobs, entropies = [], []
    for place, is_sampled in enumerate(path.sampled_mask):
        if is_sampled:
            row = torch.log_softmax(logits[place - 1] / temperatures[place], dim=-1)
            logprobs.append(row[path.token_ids[place]])
            entropies.append(-(row.exp() * row).sum())
    empty = logits.new_zeros(0)
    return (torch.stack(logprobs), torch.stack(entropies)) if logprobs else (empty, empty)


def slow_loss(
    model: Any,
    trees: Sequence[Tree],
    loss: LossSettings,
    constant: float,
    old: Any = None,
    reference: Any = None,
) -> torch.Tensor:
    """The published objectives, one trajectory and one token at a time.

    Args:
        old: a frozen model that gives the old log-probabilities; None takes the present ones.
    """
    total = torch.zeros((), dtype=torch.float32)
    paths = [path for tree in trees for path in tree.trajectories()]
    counted = [path for path in paths if LEARNING_RULES[path.status].in_denominator]
    num_groups = sum(
        any(LEARNING_RULES[leaf.status].in_denominator for leaf in tree.leaves) for tree in trees
    )
    token_mean = sum(
        path.leaf.weight * sum(sum(step.loss_mask) for step in path.steps) for path in counted
    )
    for path in paths:
        mask = [m for m, sampled in zip(path.loss_mask, path.sampled_mask, strict=True) if sampled]
        if not any(mask):
            continue
        length = sum(mask)
        if loss.aggregation == "token-mean":
            factor = path.leaf.weight / token_mean
        elif loss.aggregation == "sequence-mean":
            factor = path.leaf.weight / length / num_groups
        else:
            factor = path.leaf.weight / constant / num_groups
        logprobs = plain_scores(model, path)[0]
        with torch.no_grad():
            before = logprobs.detach() if old is None else plain_scores(old, path)[0]
            anchor = None if reference is None else plain_scores(reference, path)[0]
        advantage = path.leaf.advantage or 0.0
        origins = path.origins[len(path.prompt_ids) :]
        sampled_at = [
            p
            for p, sampled in zip(path.sampling_logprobs, path.sampled_mask, strict=True)
            if sampled
        ]
        shaping = 1 + loss.shaping_weight * origins.count(Origin.RETRIEVED) / len(origins)
        for index, has_loss in enumerate(mask):
            if not has_loss:
                continue
            ratio = shaping * torch.exp(logprobs[index] - before[index])
            bounded = torch.clamp(ratio, 1 - loss.clip_low, 1 + loss.clip_high)
            objective = torch.minimum(ratio * advantage, bounded * advantage)
            if loss.dual_clip is not None and advantage < 0:
                objective = torch.maximum(objective, torch.tensor(loss.dual_clip * advantage))
            if loss.engine_ratio_cap is not None:
                objective = objective * min(
                    math.exp(float(before[index]) - sampled_at[index]), loss.engine_ratio_cap
                )
            if anchor is not None:
                gap = anchor[index] - logprobs[index]
                objective = objective - loss.kl_coef * (torch.exp(gap) - gap - 1)
            total = total - factor * objective
    return total


def gradient_of(model: Any) -> torch.Tensor:
    return torch.cat(
        [
            torch.zeros(w.numel()) if w.grad is None else w.grad.float().flatten()
            for w in model.parameters()
        ]
    )


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Relative norm of the difference."""
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-12))


class Descent:
    """Plain gradient descent in the optimiser's place: a step that shows the gradient as it is."""

    def __init__(self, model: Any, lr: float) -> None:
        self.model, self.last_lr = model, lr
        self.gradients: list[torch.Tensor] = []

    def collect(self) -> None:
        """Gradients add up where they are."""

    def step(self) -> float:
        self.gradients.append(gradient_of(self.model))
        with torch.no_grad():
            for weight in self.model.parameters():
                if weight.grad is not None:
                    weight -= self.last_lr * weight.grad
                weight.grad = None
        return float(self.gradients[-1].norm())


def make_learner(
    model: Any, loss: LossSettings | None = None, lr: float = 0.0, **learn: Any
) -> tuple[Learner, Descent]:
    learner = Learner(
        model, LearnSettings(lr=lr, **learn), loss or LossSettings(), length_constant=7
    )
    descent = Descent(model, lr)
    learner.optimiser = descent  # type: ignore[assignment]
    return learner, descent


WAYS: dict[str, dict[str, Any]] = {
    "kernels": {},
    "dense": {"compile_kernels": False, "dense_limit": 1024},
    "flash": {"compile_kernels": False, "dense_limit": 0},
    "flex": {"flex": flex_attention},
}
"""Ways of attending over a tree."""


def attend_by(kind: str, patch: pytest.MonkeyPatch) -> None:
    """Makes the learner attend over trees in one way, however large they are."""
    patch.setattr(scores_module, "PackedPlan", lambda batch, **_: PackedPlan(batch, **WAYS[kind]))
    # Not compiled FlexAttention runs backward on a CPU as well, though it says no.
    patch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)


@pytest.fixture(params=list(WAYS))
def path_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    attend_by(request.param, monkeypatch)
    return str(request.param)


def assert_scores_equal(model: Any, batch: TreeBatch, atol: float = 1e-5) -> None:
    with torch.no_grad():
        logprobs, entropies = token_scores(model, batch)
        for path, ours, spread in zip(
            batch.paths,
            batch.per_trajectory(logprobs),
            batch.per_trajectory(entropies),
            strict=True,
        ):
            expected = plain_scores(model, path)
            torch.testing.assert_close(ours, expected[0], atol=atol, rtol=0)
            torch.testing.assert_close(spread, expected[1], atol=atol, rtol=0)


# ---------------------------------------------------------------------- law 1


@pytest.mark.parametrize("family", [*PACKABLE, *UNPACKABLE])
def test_law_1_scores_of_every_family(family: str, path_kind: str) -> None:
    model = build_model(family)
    before = model.config._attn_implementation
    assert (scores_module.packing_problem(model) is None) == (family in PACKABLE)
    if family in UNPACKABLE and path_kind != "dense":
        pytest.skip("row by row there is one way")
    assert_scores_equal(model, pack_trees(example_trees(3)))
    assert model.config._attn_implementation == before


def without_signs(tree: Tree) -> Tree:
    """The tree with the size of each advantage."""
    return replace(
        tree,
        leaves=tuple(replace(leaf, advantage=abs(leaf.advantage or 0.0)) for leaf in tree.leaves),
    )


@given(
    st.lists(random_trees(), min_size=1, max_size=3),
    st.sampled_from(list(WAYS)),
    st.sampled_from(["token-mean", "sequence-mean"]),
)
@settings(max_examples=12, deadline=None)
def test_law_1_on_random_trees(trees: list[Tree], kind: str, aggregation: str) -> None:
    credited = [assign_credit(tree) for tree in trees]
    model, twin = build_model("llama"), build_model("llama")
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
    "dual-clip": LossSettings(
        aggregation="token-mean", clip_low=0.02, clip_high=0.02, dual_clip=1.05
    ),
    # The trees' sampling log-probabilities lie in [-1, 0], the model's near -4: ratios of .02 to
    # .3, of which the cap cuts some.
    "engine-corrected": LossSettings(aggregation="token-mean", engine_ratio_cap=0.04, kl_coef=0.1),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_law_1_gradients_of_the_published_objectives(name: str, path_kind: str) -> None:
    loss = OBJECTIVES[name]
    trees = example_trees(3, advantage="dr_grpo" if name == "dr-grpo" else "grpo")
    model, twin = build_model("llama"), build_model("llama")
    learner, descent = make_learner(model, loss)
    if loss.kl_coef:
        # A reference that differs: the policy has moved since.
        learner.keep_reference()
        shift_weights(model)
        reference = copy.deepcopy(twin)
        shift_weights(twin)
    _, metrics = learner.learn(trees)
    expected = slow_loss(twin, trees, loss, 11.0, reference=reference if loss.kl_coef else None)
    expected.backward()
    assert abs(metrics["learn/loss"] - float(expected.detach())) < 1e-6
    assert distance(descent.gradients[0], gradient_of(twin)) < 1e-5


def shift_weights(model: Any) -> None:
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator)


@pytest.mark.parametrize("name", ["grpo", "dapo", "grpo-kl", "dual-clip", "engine-corrected"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_law_1_over_minibatches_and_epochs(name: str, family: str) -> None:
    """Two mini-batches, two epochs: ratios leave 1, clipping acts, old log-probabilities stay those
    of the start."""
    loss, lr = OBJECTIVES[name], 0.3
    trees = example_trees(4)
    model, twin = build_model(family), build_model(family)
    learner, _ = make_learner(model, loss, lr, num_minibatches=2, num_epochs=2)
    start = copy.deepcopy(twin)
    if loss.kl_coef:
        learner.keep_reference()
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
    assert metrics["learn/clip_frac"] > 0.0 and metrics["learn/ratio_max"] > 1.02
    assert metrics["learn/num_optimiser_steps"] == 4.0


def test_models_that_cannot_be_packed_learn_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    trees = example_trees(3)
    model, twin = build_model("llama"), build_model("llama")
    learner, packed = make_learner(model)
    monkeypatch.setattr(learner_module, "packing_problem", lambda *_, **__: "it is said not to")
    fallback, rowwise = make_learner(twin)
    assert learner.packing_problem is None and fallback.packing_problem == "it is said not to"
    learner.learn(trees)
    fallback.learn(trees)
    assert distance(rowwise.gradients[0], packed.gradients[0]) < 1e-5


def test_a_linear_attention_model_learns_row_by_row() -> None:
    trees = example_trees(3)
    model, twin = build_model("qwen3-next"), build_model("qwen3-next")
    learner, descent = make_learner(model)
    assert learner.packing_problem is not None and "1 of its 2 layers" in learner.packing_problem
    learner.learn(trees)
    slow_loss(twin, trees, LossSettings(), 7.0).backward()
    assert distance(descent.gradients[0], gradient_of(twin)) < 1e-5


def test_row_by_row_nothing_to_score_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_module, "packing_problem", lambda *_, **__: "it is said not to")
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


# ---------------------------------------------------------------------- law 3 and the status table


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
            assert (a.old_logprobs or ()) == pytest.approx(b.old_logprobs or (), abs=1e-5)
            assert (a.ratios or ()) == pytest.approx(b.ratios or (), abs=1e-4)


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
    pack = learner._packs([tree], (0,))[0]
    logprobs = torch.full((5,), -2.0, requires_grad=True)
    factors = learner._factors(pack.batch, learner._denominators([tree]))
    loss = learner._pack_loss(
        pack, logprobs, torch.zeros(5), logprobs.detach(), factors, learner_module.Tally()
    )
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
    flat, mixed = example_trees(2)[1], example_trees(1)[0]
    for aggregation in ("token-mean", "sequence-mean"):
        loss = LossSettings(aggregation=aggregation)  # type: ignore[arg-type]
        model, twin = build_model("llama"), build_model("llama")
        learner, descent = make_learner(model, loss)
        learned, metrics = learner.learn([mixed, flat])
        slow_loss(twin, [mixed, flat], loss, 7.0).backward()
        assert distance(descent.gradients[0], gradient_of(twin)) < 1e-5
        assert metrics["learn/skipped_groups_frac"] == 0.5
        assert metrics["learn/num_unique_tokens"] == sum(
            len(step.token_ids) for step in mixed.steps
        )
        assert learned[1] == flat and learned[0].steps[1].old_logprobs is not None
    # Alone there is nothing to learn: no step, no error.
    learner, descent = make_learner(build_model("llama"))
    _, metrics = learner.learn([flat])
    assert metrics["learn/skipped_groups_frac"] == 1.0 and not descent.gradients[0].any()
    assert metrics["learn/loss"] == 0.0


def test_with_a_divergence_term_flat_groups_are_learned_from() -> None:
    flat = example_trees(2)[1]
    model, twin = build_model("llama"), build_model("llama")
    loss = LossSettings(kl_coef=0.5)
    learner, descent = make_learner(model, loss)
    learner.keep_reference()
    reference = copy.deepcopy(twin)
    shift_weights(model)
    shift_weights(twin)
    _, metrics = learner.learn([flat])
    slow_loss(twin, [flat], loss, 7.0, reference=reference).backward()
    assert distance(descent.gradients[0], gradient_of(twin)) < 1e-5
    assert metrics["learn/kl"] > 0


def test_the_record_holds_old_logprobs_and_ratios() -> None:
    tree = example_trees(1)[0]
    model = build_model("llama")
    learner, _ = make_learner(model, lr=0.2, num_epochs=2)
    twin = copy.deepcopy(build_model("llama"))
    learned, _ = learner.learn([tree])
    for path in learned[0].trajectories():
        ours = [
            v
            for step in path.steps
            for v, s in zip(step.old_logprobs or (), step.sampled_mask, strict=True)
            if s
        ]
        with torch.no_grad():
            torch.testing.assert_close(
                torch.tensor(ours), plain_scores(twin, path)[0], atol=1e-5, rtol=0
            )
        for step in path.steps:
            assert all(
                r == 1.0 for r, s in zip(step.ratios or (), step.sampled_mask, strict=True) if not s
            )
    ratios = [r for step in learned[0].steps for r in step.ratios or ()]
    assert any(abs(ratio - 1.0) > 1e-3 for ratio in ratios)


@pytest.mark.parametrize(
    ("minibatches", "epochs", "num_passes"), [(1, 1, 1), (1, 2, 2), (2, 1, 1 + 2), (2, 2, 1 + 4)]
)
def test_the_first_step_needs_no_pass_before_it(
    minibatches: int, epochs: int, num_passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for each minibatch of each epoch, and one more for the old log-probabilities of every
    minibatch but the first."""
    calls = []
    plain = learner_module.packed_hidden
    monkeypatch.setattr(
        learner_module,
        "packed_hidden",
        lambda *args, **options: calls.append(1) or plain(*args, **options),
    )
    learner, _ = make_learner(
        build_model("llama"), lr=0.1, num_minibatches=minibatches, num_epochs=epochs
    )
    trees, _ = learner.learn([example_trees(1)[0], example_trees(4)[3]])
    assert len(calls) == num_passes
    assert all(
        step.old_logprobs is not None
        for tree in trees
        for step in tree.steps
        if any(step.loss_mask)
    )


# ---------------------------------------------------------------------- scores


@pytest.mark.parametrize("chunk", [1, 3, 512])
def test_vocabulary_chunks_change_nothing(chunk: int) -> None:
    model = build_model("llama")
    batch = pack_trees(example_trees(2))
    whole, parts = token_scores(model, batch), token_scores(model, batch, vocab_chunk=chunk)
    for ours, theirs in zip(parts, whole, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    ours, theirs = (
        [t.clone() for t in torch.autograd.grad(s[0].sum() + s[1].sum(), list(model.parameters()))]
        for s in (parts, whole)
    )
    assert (
        distance(torch.cat([t.flatten() for t in ours]), torch.cat([t.flatten() for t in theirs]))
        < 1e-5
    )


@pytest.mark.parametrize("used", ["logprobs", "entropies", "both"])
@pytest.mark.parametrize("cached", [1, 64, 1 << 20])
def test_scores_and_their_gradients_are_those_of_the_formulas(
    used: str, cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against automatic differentiation in float64, a row, a few rows and all rows at a time."""
    monkeypatch.setattr(scores_module, "_CACHED", cached)
    draw = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(7, 5, generator=draw), torch.randn(19, 5, generator=draw) * 3
    targets, temperatures = (
        torch.randint(0, 19, (7,), generator=draw),
        torch.rand(7, generator=draw) + 0.5,
    )
    parts = {"logprobs": [1, 0], "entropies": [0, 1], "both": [1, 1]}
    upstream = torch.randn(2, 7, generator=draw) * torch.tensor(parts[used])[:, None]

    def gradients(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        leaves = [tensor.to(dtype).clone().requires_grad_() for tensor in (hidden, weight)]

        def head(rows: torch.Tensor) -> torch.Tensor:
            return rows @ leaves[1].T

        if dtype == torch.float64:
            logs = torch.log_softmax(head(leaves[0]) / temperatures.double()[:, None], dim=-1)
            columns = logs.gather(1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)
        else:
            columns = scores_module.chunked_scores(head, leaves[0], targets, temperatures, 4)  # type: ignore[arg-type]
        total = sum(
            (column * g.to(column)).sum()
            for column, g in zip(columns, upstream, strict=True)
            if g.any()
        )
        return (*(column.detach() for column in columns), *torch.autograd.grad(total, leaves))  # type: ignore[arg-type]

    for ours, exact in zip(gradients(torch.float32), gradients(torch.float64), strict=True):
        torch.testing.assert_close(ours.double(), exact, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("chunk", "num_products"), [(8, 1), (7, 1), (6, 4), (3, 6)])
def test_logits_that_fit_are_computed_once(chunk: int, num_products: int) -> None:
    """A chunk each, and each again for the backward pass where not all fit at once."""
    calls = []

    def head(rows: torch.Tensor) -> torch.Tensor:
        calls.append(len(rows))
        return rows @ torch.ones(4, 9)

    targets = torch.arange(7)
    logprobs, _ = scores_module.chunked_scores(
        head, torch.ones(7, 4, requires_grad=True), targets, torch.ones(7), chunk
    )  # type: ignore[arg-type]
    logprobs.sum().backward()
    assert len(calls) == num_products
    assert max(calls) <= chunk


def test_the_attention_comes_back_also_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model("llama")
    before = model.config._attn_implementation
    batch = pack_trees(example_trees(1))
    token_scores(model, batch)
    assert model.config._attn_implementation == before

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(learner_module, "packed_hidden", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        token_scores(model, batch)
    assert model.config._attn_implementation == before
    model(input_ids=torch.tensor([[3, 4]]))


def test_scores_of_a_model_in_training_hands() -> None:
    """`Learner` keeps its attention installed; `token_scores` on its model is still right."""
    model, twin = build_model("llama"), build_model("llama")
    Learner(model, LearnSettings(), LossSettings(), length_constant=7)
    batch = pack_trees(example_trees(2))
    with torch.no_grad():
        torch.testing.assert_close(
            token_scores(model, batch)[0], token_scores(twin, batch)[0], atol=1e-6, rtol=0
        )


def test_an_unknown_head_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model("granite")
    monkeypatch.setattr(
        "treegraft.policy.head.Head.__call__", lambda self, hidden: self._project(hidden)
    )
    with pytest.raises(ModelError, match="logits differ"):
        token_scores(model, pack_trees(example_trees(1)))


def test_gradient_checkpointing_changes_no_gradient() -> None:
    trees = example_trees(3)
    gradients = []
    for is_on in (False, True):
        model = build_model("llama")
        model = with_adapters(model, ModelSettings(gradient_checkpointing=is_on), seed=0)
        learner, descent = make_learner(model)
        learner.learn(trees)
        gradients.append(descent.gradients[0])
    assert gradients[0].any()
    assert distance(gradients[1], gradients[0]) < 1e-6


# ---------------------------------------------------------------------- weights


def test_a_tiny_step_survives_in_bfloat16() -> None:
    """1000 steps of 1e-6 relative are 1e-3: nothing in bfloat16 (its unit is 2^-8), all of it in
    the float32 masters."""
    model = torch.nn.Linear(4, 1, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimiser = MasterAdamW(model, LearnSettings(lr=1e-6, max_grad_norm=1e9))
    for _ in range(1000):
        model.weight.grad = torch.ones_like(model.weight)
        optimiser.collect()
        optimiser.step()
    # AdamW on a constant gradient moves by lr each step.
    torch.testing.assert_close(
        optimiser.state()["master.weight"], torch.full((1, 4), 0.999), atol=2e-5, rtol=0
    )
    assert model.weight.dtype == torch.bfloat16
    for _ in range(3000):
        model.weight.grad = torch.ones_like(model.weight)
        optimiser.collect()
        optimiser.step()
    assert float(model.weight[0, 0].detach()) == pytest.approx(0.996, abs=2**-8 / 2)


def test_adamw_by_hand() -> None:
    """One step from zero moments moves by lr · g / (|g| + eps) after clipping to norm 1; warm-up
    halves the first of two."""
    model = torch.nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -1.0]]))
    optimiser = MasterAdamW(
        model, LearnSettings(lr=0.1, lr_warmup_steps=2, weight_decay=0.5, max_grad_norm=1.0)
    )
    model.weight.grad = torch.tensor([[3.0, -4.0]])
    optimiser.collect()
    assert optimiser.step() == pytest.approx(5.0)
    assert optimiser.last_lr == pytest.approx(0.05)
    # w (1 - lr · decay) - lr · sign(g)
    torch.testing.assert_close(
        model.weight.detach(), torch.tensor([[0.975 - 0.05, -0.975 + 0.05]]), atol=1e-6, rtol=0
    )
    assert optimiser.step() == 0.0  # no gradient: nothing moves, the count goes on
    assert optimiser.num_steps == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimiser_goes_on_from_its_state(dtype: torch.dtype) -> None:
    trees = example_trees(3)

    def learner_of() -> Learner:
        return Learner(
            build_model("llama", dtype=dtype),
            LearnSettings(lr=1e-3),
            LossSettings(),
            length_constant=7,
        )

    whole = learner_of()
    whole.learn(trees)
    state = {name: tensor.clone() for name, tensor in whole.state().items()}
    resumed = learner_of()
    resumed.load_state(state)
    for learner in (whole, resumed):
        learner.learn(trees)
    ours, theirs = resumed.state(), whole.state()
    assert ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            resumed.weights().tensors.values(), whole.weights().tensors.values(), strict=True
        )
    )


def test_lora_weights_are_those_of_merge_and_unload() -> None:
    model = with_adapters(
        build_model("llama"), ModelSettings(lora=LoraSettings(rank=2, alpha=8)), seed=1
    )
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:  # B starts at zero
                weight.copy_(torch.randn(weight.shape, generator=generator))
    ours = {name: tensor.clone() for name, tensor in plain_weights(model).items()}
    plain_names = build_model("llama").state_dict().keys()
    merged = model.merge_and_unload().state_dict()
    assert ours.keys() == merged.keys() == plain_names
    for name, tensor in merged.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-6, rtol=1e-6)
    assert any(
        not torch.equal(ours[name], build_model("llama").state_dict()[name]) for name in ours
    )


@pytest.mark.parametrize("is_checkpointing", [False, True])
def test_lora_learns_its_adapters_only(is_checkpointing: bool) -> None:
    settings_ = ModelSettings(lora=LoraSettings(rank=2), gradient_checkpointing=is_checkpointing)
    model = with_adapters(build_model("llama"), settings_, seed=1)
    learner = Learner(model, LearnSettings(lr=1e-2), LossSettings(), length_constant=7)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    _, metrics = learner.learn(example_trees(3))
    moved = {
        name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])
    }
    assert moved and all("lora_" in name for name in moved)
    assert metrics["learn/grad_norm"] > 0


def test_minibatches_are_cut_evenly() -> None:
    assert split_evenly(7, 3) == [(0, 1), (2, 3), (4, 5, 6)]
    assert split_evenly(2, 3) == [(), (0,), (1,)]
    assert split_evenly(4, 1) == [(0, 1, 2, 3)]


def test_metrics_are_per_contribution() -> None:
    """BRANCHING: loss tokens on paths 2+2+2, 2+2+2, (2+2+1), (2+3), 4, 2; the failed leaf's shared
    token has none of its own."""
    tree = example_trees(1)[0]
    learner, _ = make_learner(build_model("llama"))
    _, metrics = learner.learn([tree])
    assert metrics["learn/num_contributions"] == 6 + 6 + 5 + 5 + 4 + 2
    path_tokens = [5 + 4 + 5 + 2, 5 + 4 + 5 + 3, 5 + 4 + 5 + 1, 5 + 4 + 3, 5 + 4, 5 + 2, 5 + 2]
    assert metrics["learn/unique_frac"] == pytest.approx(
        metrics["learn/num_unique_tokens"] / sum(path_tokens)
    )
    assert metrics["learn/num_unique_tokens"] == 5 + 4 + 5 + 2 + 3 + 1 + 3 + 4 + 2 + 2
    assert (
        metrics["learn/ratio_max"] == 1.0
        and metrics["learn/clip_frac"] == 0.0
        and metrics["learn/approx_kl"] == 0.0
    )
