"""Trees whose steps saw contexts of their own: packed, in rows and recorded, against each step as a
row of its own."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.policy.test_leaf_rows import AGGREGATIONS, CASES, PARTS, config_of, rows_loss
from tests.policy.test_packed_equals_separate import (
    OBJECTIVES,
    without_signs,
)
from tests.support.families import build_model
from tests.support.slow_learner import (
    WAYS,
    assert_scores_equal,
    attend_by,
    distance,
    example_trees,
    gradient_of,
    make_learner,
    saw,
    slow_loss,
)
from tests.support.trees import Part, build_tree, mixed_trees, random_trees, with_contexts

from treegraft.algo.advantages import assign_credit
from treegraft.core.types import ContextCause, Tree
from treegraft.policy.learn import learner as learner_module
from treegraft.policy.learn.credit import credit_trees
from treegraft.policy.learn.pack import in_packed_order, pack_trees, split_tree
from treegraft.policy.learn.rows import leaf_rows
from treegraft.runs.tree_json import tree_from_json, tree_to_json
from treegraft.settings.policy import LossSettings

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def dropped() -> Tree:
    """A thought and a call (sss), the call anew with its result (ctt), an answer (ss): the answer
    saw ppp c tt. A second rollout answers at once."""
    whole = build_tree(Part.of("ppp", Part.of("sssctt", Part("ss", reward=1.0)), Part("s")))
    steps = {step.id: step for step in whole.steps}
    names = ("token_ids", "origins", "loss_mask", "sampling_logprobs", "entropies")
    step = steps["0.0"]
    first, second = (
        replace(step, **{name: getattr(step, name)[part] for name in names})
        for part in (slice(3), slice(3, None))
    )
    anew = replace(second, id="0.0.0", depth=2, parent="0", cause=ContextCause())
    answer = replace(steps["0.0.0"], id="0.0.0.0", depth=3, parent="0.0.0")
    leaf = replace(whole.leaves[0], step_id="0.0.0.0")
    return replace(
        whole,
        steps=(steps["0"], first, anew, answer, steps["0.1"]),
        leaves=(leaf, whole.leaves[1]),
    )


def example_contexts(count: int = 3) -> list[Tree]:
    return [
        assign_credit(with_contexts(tree, seed)) for seed, tree in enumerate(example_trees(count))
    ]


# ---------------------------------------------------------------------- by hand


def test_by_hand() -> None:
    """
    0 ppp   0.0 sss   0.0.0 ctt (parent 0)   0.0.0.0 ss   0.1 s
    place     0 1 2   3 4 5   6 7 8   9 10   11
    position  0 1 2   3 4 5   3 4 5   6  7    3
    """
    tree = dropped()
    batch = pack_trees([tree])
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 3]
    # The answer's first token is predicted by the result's last one.
    assert batch.sampled.tolist() == [3, 4, 5, 9, 10, 11]
    assert batch.sources.tolist() == [2, 3, 4, 8, 9, 2]
    assert [tuple(node) for node in batch.trees[0].nodes] == [
        (0, 3, 12),
        (3, 6, 6),
        (6, 11, 11),
        (11, 12, 12),
    ]
    assert batch.trajectories.tolist() == [0, 0, 0, 0, 0, 1]
    assert batch.lengths.tolist() == [5.0, 1.0]
    # Rows: ppp sss, ppp ctt ss, ppp s.
    assert batch.num_path_tokens == 6 + 8 + 4
    first, second = tree.trajectories()[0].rows()
    ids = [step.token_ids.tolist() for step in tree.steps]
    assert first.path.token_ids == ids[0] + ids[1]
    assert second.path.token_ids == ids[0] + ids[2] + ids[3]
    assert (first.num_shared, second.num_shared) == (0, 1)
    assert [step.id for step in tree.trajectories()[0].steps] == ["0", "0.0", "0.0.0.0"]


@pytest.mark.parametrize(
    "name", ["token_ids", "completion_ids", "loss_mask", "token_advantages", "entropies"]
)
def test_flat_lists_name_rows(name: str) -> None:
    path, other = dropped().trajectories()
    with pytest.raises(ValueError, match=r"contexts of their own.*use rows\(\)"):
        getattr(path, name)
    assert len(getattr(other, name)) in (1, 4)


def test_a_context_left_and_taken_up_again() -> None:
    """A subagent from nothing, between a call and what it returns: time 0, 0.0, its prompt and
    answer, and the main agent's next context, which continues its call."""
    whole = build_tree(
        Part.of("ppp", Part.of("sss", Part.of("tt", Part.of("ss", Part.of("t", Part("ss"))))))
    )
    parents = {"0.0.0": None, "0.0.0.0.0": "0.0"}
    steps = []
    for step in whole.steps:
        if step.id in parents:
            step = replace(step, parent=parents[step.id], cause=ContextCause())
        steps.append(step)
    tree = assign_credit(replace(whole, steps=tuple(steps)))
    order = [step.id for step in in_packed_order(tree.steps)]
    assert order == ["0", "0.0", "0.0.0.0.0", "0.0.0.0.0.0", "0.0.0", "0.0.0.0"]
    batch = pack_trees([tree])
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2, 3]
    rows = tree.trajectories()[0].rows()
    assert [[step.id for step in row.path.steps] for row in rows] == [
        ["0.0.0", "0.0.0.0"],
        ["0", "0.0", "0.0.0.0.0", "0.0.0.0.0.0"],
    ]
    assert_scores_equal(build_model("llama"), batch)


@pytest.mark.parametrize("parent", ["0.1", "0.0.0", "9"])
def test_a_parent_that_is_not_earlier_is_refused(parent: str) -> None:
    tree = dropped()
    steps = [replace(step, parent=parent) if step.id == "0.0.0" else step for step in tree.steps]
    with pytest.raises(ValueError, match=r"step '0\.0\.0' has no parent"):
        replace(tree, steps=tuple(steps))


# ---------------------------------------------------------------------- laws


@given(
    st.lists(st.one_of(random_trees(), mixed_trees()), min_size=1, max_size=2),
    st.integers(0, 10**6),
    st.sampled_from(WAYS),
    st.sampled_from(AGGREGATIONS),
)
@settings(max_examples=15, deadline=None)
def test_law_1_on_random_trees(trees: list[Tree], seed: int, kind: str, aggregation: str) -> None:
    credited = [assign_credit(with_contexts(tree, seed)) for tree in trees]
    model = build_model("llama")
    twin = build_model("llama")
    loss = LossSettings(aggregation=aggregation)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        attend_by(kind, patch)
        assert_scores_equal(model, pack_trees(credited))
        learner, descent = make_learner(model, loss)
        _, metrics = learner.learn(credited)
    expected = slow_loss(twin, credited, loss, 7.0)
    assert abs(metrics["learn/loss"] - float(expected.detach())) < 1e-6
    if expected.requires_grad:
        expected.backward()
        unsigned = build_model("llama")
        slow_loss(unsigned, [*map(without_signs, credited)], loss, 7.0).backward()
        scale = max(float(gradient_of(twin).norm()), float(gradient_of(unsigned).norm()))
        gap = (descent.gradients[0] - gradient_of(twin)).norm()
        assert gap <= 1e-5 * scale + 1e-7


@pytest.mark.parametrize("credit", ["soft", "hard", "rapo"])
@pytest.mark.parametrize("name", ["grpo", "dapo", "grpo-kl", "entropy-bonus", "gspo"])
def test_law_1_of_the_published_objectives(name: str, credit: str, tmp_path: Path) -> None:
    """GRPO, ARPO's attributions, RAPO's factor on grafts; two mini-batches and two epochs."""
    loss = OBJECTIVES[name]
    if credit == "rapo":
        loss = loss.model_copy(update={"shaping_weight": 0.6})
    plain = example_trees(4)
    anew = [with_contexts(tree, seed) for seed, tree in enumerate(plain)]
    attribution = "hard" if credit == "hard" else "soft"
    trees = [assign_credit(tree, attribution=attribution) for tree in anew]
    model = build_model("llama")
    twin = build_model("llama")
    start = copy.deepcopy(twin)
    learner, _ = make_learner(model, loss, 0.3, num_minibatches=2, num_epochs=2)
    if loss.kl_coef:
        learner.keep_reference(tmp_path, is_new=True)
    _, metrics = learner.learn(trees)
    for _ in range(2):
        for part in (trees[:2], trees[2:]):
            twin.zero_grad()
            anchor = start if loss.kl_coef else None
            slow_loss(twin, part, loss, 7.0, old=start, reference=anchor).backward()
            with torch.no_grad():
                for weight in twin.parameters():
                    weight -= 0.3 * weight.grad
    ours, theirs, first = (
        torch.cat([w.detach().flatten() for w in m.parameters()]) for m in (model, twin, start)
    )
    assert distance(ours - first, theirs - first) < 1e-4
    assert metrics["learn/unique_frac"] < 1.0


@given(random_trees(min_starts=2), st.integers(0, 10**6), st.integers(8, 40))
@settings(max_examples=15, deadline=None)
def test_a_split_tree_has_the_same_gradient(tree: Tree, seed: int, size: int) -> None:
    credited = assign_credit(with_contexts(tree, seed))
    models = [build_model("llama"), build_model("llama")]
    gradients = []
    for model, tokens in zip(models, (10_000, size), strict=True):
        learner, descent = make_learner(model, max_pack_tokens=tokens)
        learner.learn([credited])
        gradients.append(descent.gradients[0])
    assert len(split_tree(credited, size)) >= 1
    assert (gradients[0] - gradients[1]).norm() <= 1e-5 * gradients[0].norm() + 1e-6


@pytest.mark.parametrize("family", ["llama", "mamba"])
def test_row_by_row_is_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trees = example_contexts()
    model = build_model(family)
    twin = build_model(family)
    monkeypatch.setattr(learner_module, "packing_problem", lambda _: "it is said not to")
    learner, descent = make_learner(model)
    learner.learn(trees)
    slow_loss(twin, trees, LossSettings(), 7.0).backward()
    assert distance(descent.gradients[0], gradient_of(twin)) < 1e-5


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", CASES)
def test_law_19_rows_of_contexts(name: str, aggregation: str) -> None:
    config = config_of(name, aggregation)
    built = [build_tree(part, task_id=f"t/{n}", seed=n) for n, part in enumerate(PARTS)]
    trees = credit_trees([with_contexts(tree, n) for n, tree in enumerate(built)], config)
    model = build_model("llama")
    twin = build_model("llama")
    rows = leaf_rows(trees, config)
    assert len(rows) > len({(row.group_id, row.leaf_id) for row in rows})
    learner, descent = make_learner(model, config.loss)
    _, metrics = learner.learn(trees)
    loss = rows_loss(twin, rows, config.loss)
    loss.backward()
    assert abs(metrics["learn/loss"] - float(loss.detach())) < 1e-5
    assert distance(descent.gradients[0], gradient_of(twin)) < 1e-5


@given(random_trees(), st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_records_and_rows_hold_every_step(tree: Tree, seed: int) -> None:
    anew = with_contexts(tree, seed)
    assert tree_from_json(tree_to_json(anew)) == anew
    for path in anew.trajectories():
        rows = path.rows()
        own = [step.id for row in rows for step in row.path.steps[row.num_shared :]]
        sampled = {step.id for step in path.steps if step.num_sampled}
        assert len(own) == len(set(own)) and sampled <= set(own)
        for row, step in itertools.product(rows, path.steps):
            if step in row.path.steps:
                place = row.path.steps.index(step)
                assert [*row.path.steps[: place + 1]] == saw(path, step)
