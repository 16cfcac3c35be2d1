"""APPO by hand: branches that teach the steps above them, weights by what comes after, places of
branches."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.families import build_model
from tests.support.slow_learner import distance, gradient_of, make_learner, slow_loss
from tests.support.tiny import tiny
from tests.support.trees import Part, build_tree

from treegraft.algo.advantages import assign_credit
from treegraft.core.types import BranchCause, Start, Status, Tree
from treegraft.extras.methods.appo import APPO, PeaksSettings
from treegraft.extras.methods.appo_explorer import EntropyPeaks
from treegraft.extras.methods.appo_math import advantages_apart, future_weights, peaks
from treegraft.policy.learn.pack import pack_trees
from treegraft.runs.record import read_trees
from treegraft.settings.policy import LossSettings
from treegraft.train import train


def grown() -> Tree:
    """Two rollouts; of the first, one branch left after its first step and two after its second,
    of which one branched again."""
    last = Part.of(
        "st", Part("s", reward=1.0), Part("s", reward=0.0), Part.of("st", Part("s", reward=1.0))
    )
    tree = build_tree(
        Part.of("p", Part.of("st", last, Part("s", reward=1.0)), Part("ss", reward=0.0))
    )
    branches = ("0.0.0.1", "0.0.0.2", "0.0.1")
    cause = BranchCause(entropy_change=1.0, probability=1.0, rule="entropy_peaks")
    return replace(
        tree,
        steps=tuple(
            replace(step, cause=cause) if step.id in branches else step for step in tree.steps
        ),
    )


def test_rollouts_and_branches_are_two_groups() -> None:
    found = advantages_apart([1.0, 0.0, 1.0, 0.0, 1.0], [False, False, True, True, True], eps=0.0)
    # Deviations with divisor n: 1/2, and sqrt(2/9).
    spread = math.sqrt(2 / 9)
    assert found.tolist() == [
        pytest.approx(one) for one in (1, -1, 1 / 3 / spread, -2 / 3 / spread, 1 / 3 / spread)
    ]
    assert advantages_apart([1.0, 0.0, 5.0], [False, False, True], eps=0.0)[2] == 0.0
    assert advantages_apart([0.3, 0.3], [True, True], eps=0.0).tolist() == [0.0, 0.0]


def test_branches_teach_the_steps_above_them() -> None:
    """Rollouts 1 and 0: ± 1. Branches 0, 1, 1: mean 2/3, deviation sqrt(2/9), so -√2, √½, √½.
    Behind the second step the mean of two of them, -√2 / 4; behind the first one that of all, 0."""
    tree = assign_credit(grown(), advantage=APPO, eps=1e-12)
    step = {one.id: one.advantage for one in tree.steps}
    low = -math.sqrt(2) / 4
    assert step["0.0.0"] == pytest.approx(1 + low)
    assert step["0.0"] == pytest.approx(1)
    # Its own end, the other rollout and the branches have no gain.
    assert {name for name, value in step.items() if value is not None} == {"0.0", "0.0.0"}
    assert [leaf.has_loss for leaf in tree.leaves] == [True, False, False, False, True]
    assert [leaf.weight for leaf in tree.leaves] == [0.5, 0.0, 0.0, 0.0, 0.5]
    batch = pack_trees([tree])
    carried = batch.advantages[batch.carries_loss].tolist()
    assert carried == [pytest.approx(value) for value in (1, 1 + low, 1, -1, -1)]
    assert assign_credit(tree, advantage=APPO, eps=1e-12) == tree


def test_without_branches_it_is_grpo_with_divisor_n() -> None:
    tree = build_tree(Part.of("p", Part("s", reward=1.0), Part("s"), Part("s"), Part("s")))
    found = assign_credit(tree, advantage=APPO, eps=0.0)
    assert [leaf.advantage for leaf in found.leaves] == [
        pytest.approx(one / math.sqrt(3)) for one in (3, -1, -1, -1)
    ]
    assert [leaf.weight for leaf in found.leaves] == [0.25] * 4
    assert all(leaf.has_loss for leaf in found.leaves)


def test_branches_of_a_rollout_that_failed_teach_nothing() -> None:
    tree = build_tree(
        Part.of("p", Part.of("st", Part("", status=Status.FAILED), Part("s", reward=1.0)))
    )
    cause = BranchCause(entropy_change=1.0, probability=1.0, rule="entropy_peaks")
    steps = [replace(one, cause=cause) if one.id == "0.0.1" else one for one in tree.steps]
    found = assign_credit(replace(tree, steps=tuple(steps)), advantage=APPO)
    assert [leaf.weight for leaf in found.leaves] == [0.0, 0.0]
    assert not pack_trees([found]).carries_loss.any()


def test_branches_need_no_pass() -> None:
    """Only rollouts carry loss: 0.0.0.0 with the steps above it, and 0.1."""
    tree = assign_credit(grown(), advantage=APPO)
    loss = LossSettings(aggregation="token-mean")
    model = build_model("llama")
    twin = build_model("llama")
    learner, descent = make_learner(model, loss)
    (learned,), metrics = learner.learn([tree])
    passed = {step.id for step in learned.steps if step.old_logprobs is not None}
    assert passed == {"0", "0.0", "0.0.0", "0.0.0.0", "0.1"}
    sizes = {step.id: len(step.token_ids) for step in tree.steps}
    assert metrics["learn/num_unique_tokens"] == sum(sizes[name] for name in passed)
    slow_loss(twin, [tree], loss, 7.0).backward()
    assert distance(descent.gradients[0], gradient_of(twin)) < 1e-5
    # Its branches are recorded all the same.
    assert [step.id for step in learned.steps] == [step.id for step in tree.steps]
    assert len(learned.leaves) == len(tree.leaves)


def test_what_comes_after_a_token_weighs_by_distance() -> None:
    def weights(
        gaps: list[float], owners: list[int], sign: float = 1.0, at: list[int] | None = None
    ) -> list[float]:
        signs = [sign] * len(gaps)
        places = at or list(range(len(gaps)))
        how = {"weight": 0.5, "half_life": 1.0, "highest": 1.2, "limit": 3.0}
        return future_weights(gaps, owners, signs, places, **how)

    # Half for each token further on: .1 + .04 / 2 + .08 / 4, .04 + .04, .08; another trajectory.
    expected = [1 + 0.5 * math.exp(total) for total in (0.14, 0.08, 0.08)]
    assert weights([0.1, 0.04, 0.08, 0.0], [0, 0, 0, 1]) == [
        pytest.approx(one) for one in (*expected, 1.5)
    ]
    # From 1 to the highest.
    assert weights([-1.0, 0.5], [0, 1]) == [pytest.approx(1.5), pytest.approx(1.6)]
    # Two tool tokens between the second and the third: a distance of 3, an eighth.
    assert weights([0.1, 0.04, 0.08], [0, 0, 0], at=[5, 6, 9]) == [
        pytest.approx(1 + 0.5 * math.exp(total)) for total in (0.1 + 0.025, 0.05, 0.08)
    ]
    # A ratio above 3 is left out of the sums: of 1.2 and .16 the second alone, half of it.
    assert weights([1.2, 0.16], [0, 0]) == [
        pytest.approx(1 + 0.5 * math.exp(x)) for x in (0.08, 0.16)
    ]
    # A ratio past 6 with a negative advantage is not raised, whatever comes after.
    assert weights([2.0, 0.1], [0, 0], -1.0)[0] == 1.5
    assert weights([2.0, 0.1], [0, 0])[0] == pytest.approx(1 + 0.5 * math.exp(0.05))
    # Two tokens past dual clip with a negative advantage: the trajectory teaches nothing.
    assert weights([1.2, 0.0, 1.2, 0.0], [0, 0, 0, 1], -1.0) == [0.0, 0.0, 0.0, 1.5]
    assert 0.0 not in weights([1.2, 0.0, 1.2], [0, 0, 0])


def test_a_peak_is_a_step_of_its_rollout() -> None:
    # Of 1, 3, 1, 3, 2: mean 2, variance 4/5.
    found = peaks([[1.0, 3.0], [1.0], [3.0, 2.0], []])
    high = 1 / math.sqrt(0.8)
    assert found == [pytest.approx(high), pytest.approx(-high), pytest.approx(high), -math.inf]
    assert peaks([[0.5], [0.5, 0.5]]) == [0.0, 0.0]


def test_branches_go_to_the_highest_peaks_of_all_rollouts() -> None:
    explorer = EntropyPeaks(PeaksSettings(num_starts=2))
    assert explorer.starts(8) == Start(2) and explorer.starts(1) == Start(1)
    sure = Part.of("st", Part("s", entropies=[1.2]), entropies=[1.0])
    unsure = Part.of(
        "st",
        Part.of("st", Part("ss", entropies=[0.1, 0.1]), entropies=[4.0]),
        entropies=[0.1],
    )
    tree = build_tree(Part.of("p", sure, unsure))
    # z of the second step of the second rollout: 2.925 / 1.69 = 1.73; of the first one's end: 1.
    found = explorer.fill(tree, 5)
    assert isinstance(found, list)
    assert [(one.step_id, one.num) for one in found] == [("0.1", 1), ("0.0", 1), ("0.1.0", 1)]
    assert found[0].cause.entropy_change == pytest.approx(math.sqrt(3))
    assert [one.step_id for one in explorer.fill(tree, 3)] == ["0.1"]  # type: ignore[union-attr]
    # One round: with branches there, the rest are fresh rollouts; so they are where nothing has
    # called a tool.
    cause = BranchCause(entropy_change=0.0, probability=1.0, rule="entropy_peaks")
    steps = [replace(one, cause=cause) if one.id == "0.1.0" else one for one in tree.steps]
    assert explorer.fill(replace(tree, steps=tuple(steps)), 5) == Start(3)
    assert explorer.fill(build_tree(Part.of("p", Part("s"), Part("s"))), 5) == Start(3)


def test_a_run_of_appo(tmp_path: Path) -> None:
    settings = tiny(
        run={"name": "a", "dir": str(tmp_path), "num_updates": 1},
        explore={"explorers": ["entropy_peaks"], "num_leaves": 6},
        credit={"advantage": "appo"},
        loss={"future_weight": 1.0, "dual_clip": 3.0, "aggregation": "token-mean"},
        eval={"every": 0, "at_start": False, "at_end": False},
    )
    done = train(settings, display=False)
    trees = read_trees(done.run_dir / "trees" / "update-000001.jsonl")
    assert all(len(tree.leaves) == 6 for tree in trees)
    branches = [one for tree in trees for one in tree.steps if isinstance(one.cause, BranchCause)]
    assert branches and "learn/loss" in done.metrics
    # A branch leaves a rollout below a step with a result, and has no share of the loss.
    assert all(one.depth > 1 for one in branches)
    for path in (path for tree in trees for path in tree.trajectories()):
        is_own = not any(isinstance(one.cause, BranchCause) for one in path.steps)
        assert path.leaf.has_loss == is_own == (path.leaf.weight > 0)
