"""GiGPO's credit by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from tests.support.trees import Part, build_tree

from treegraft.algo.advantages import assign_credit, group_members
from treegraft.core.types import (
    Observation,
    StepContent,
    ToolCall,
    Tree,
)
from treegraft.extras.methods import gigpo_math
from treegraft.extras.methods.gigpo import GIGPO
from treegraft.extras.methods.gigpo_math import state_advantages, step_weighted_advantages
from treegraft.extras.methods.gigpo_math import states as own_states


@pytest.fixture(autouse=True)
def half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gigpo_math, "DISCOUNT", 0.5)


STATES = partial(own_states, credit=None, scale="none")


def observed(tree: Tree, seen: dict[str, str]) -> Tree:
    """The tree with a result of the given text at the steps named."""
    steps = [
        replace(
            step,
            content=StepContent(
                calls=(ToolCall(name="look", body=""),),
                observations=(Observation(text=seen[step.id]),),
            ),
        )
        if step.id in seen
        else step
        for step in tree.steps
    ]
    return replace(tree, steps=tuple(steps))


def test_states_of_gigpo_by_hand() -> None:
    """Three rollouts of rewards 1, 0, 1 and discount 1/2; the first two saw "a", the third "b".

    First steps, one state: returns 1/2, 0, and 1 for the third, which has one step more: R · 1/4 =
    1/4. Second steps after "a": 1 and 0, less their mean ± 1/2; after "b" one alone: 0.
    """
    tree = build_tree(
        Part.of(
            "p",
            Part.of("s", Part("s", reward=1.0)),
            Part.of("s", Part("s", reward=0.0)),
            Part.of("s", Part.of("s", Part("s", reward=1.0))),
        )
    )
    tree = observed(tree, {"0.0": "a", "0.1": "a", "0.2": "b", "0.2.0": "c"})
    found = state_advantages(group_members(tree), discount=0.5, scale="none")
    assert found == {
        (0, "0.0"): pytest.approx(0.25),  # of 1/2, 0 and 1/4
        (1, "0.1"): pytest.approx(-0.25),
        (2, "0.2"): pytest.approx(0.0),
        (0, "0.0.0"): pytest.approx(0.5),
        (1, "0.1.0"): pytest.approx(-0.5),
        (2, "0.2.0"): 0.0,
        (2, "0.2.0.0"): 0.0,
    }
    credited = assign_credit(tree, advantage="dr_grpo", attribution=STATES)
    carried = {step.id: step.advantage for step in credited.steps}
    # Own advantages 1/3, -2/3, 1/3.
    assert carried == {
        "0": None,
        "0.0": pytest.approx(1 / 3 + 0.25),
        "0.0.0": pytest.approx(1 / 3 + 0.5),
        "0.1": pytest.approx(-2 / 3 - 0.25),
        "0.1.0": pytest.approx(-2 / 3 - 0.5),
        "0.2": pytest.approx(1 / 3),
        "0.2.0": pytest.approx(1 / 3),
        "0.2.0.0": pytest.approx(1 / 3),
    }


def test_a_shared_step_carries_the_mean_over_its_trajectories() -> None:
    """Two leaves of rewards 1 and 0 below one step: its returns 1/2 and 0 lie ± 1/4 about their
    mean, and so do the advantages of ± 1/2; both means are 0."""
    tree = build_tree(Part.of("p", Part.of("s", Part("s", reward=1.0), Part("s", reward=0.0))))
    credited = assign_credit(observed(tree, {"0.0": "a"}), advantage="dr_grpo", attribution=STATES)
    assert [step.advantage for step in credited.steps] == [
        None,
        pytest.approx(0.0),
        pytest.approx(1.0),
        pytest.approx(-1.0),
    ]


def test_a_long_trajectory_weighs_by_its_steps_in_gigpos_code() -> None:
    """Rewards 1 and 0 with 3 steps and 1: mean 3/4, variance (3/16 + 9/16) / 3 = 1/4."""
    found = step_weighted_advantages([1.0, 0.0], [3, 1], eps=0.0)
    assert found.tolist() == [pytest.approx(0.5), pytest.approx(-1.5)]
    # One step each: GRPO's.
    assert step_weighted_advantages([1.0, 0.0], [1, 1], eps=0.0).tolist() == [
        pytest.approx(0.5 / 0.5**0.5),
        pytest.approx(-0.5 / 0.5**0.5),
    ]
    assert step_weighted_advantages([1.0, 1.0, 7.0], [2, 1, 0]).tolist() == [0.0, 0.0, 0.0]
    tree = build_tree(
        Part.of("p", Part.of("st", Part.of("st", Part("s", reward=1.0))), Part("s", reward=0.0))
    )
    credited = assign_credit(tree, advantage=GIGPO, eps=1e-12)
    assert [leaf.advantage for leaf in credited.leaves] == [
        pytest.approx(0.5),
        pytest.approx(-1.5),
    ]
