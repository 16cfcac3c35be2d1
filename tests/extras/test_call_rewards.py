"""Rewards for calls, on trajectories by hand."""

from __future__ import annotations

import asyncio
from math import sqrt
from typing import Any

import pytest
from tests.tasks.test_rewards import SEARCH, make_tree

from treegraft import Origin, Status, StepContent
from treegraft.extras.methods.call_rewards import call_bonus, call_novelty, own_calls
from treegraft.parts import ToolCall
from treegraft.settings.tasks import RewardSettings
from treegraft.tasks.rewards import RewardScorer, build_rewards

OTHER = StepContent(calls=(ToolCall("search", "another"),), observations=SEARCH.observations)
UNANSWERED = StepContent(calls=(ToolCall("search", "q"),))
RIGHT = StepContent(answer="New York City")
WRONG = StepContent(answer="Boston")


def path(*contents: StepContent, origin: Origin = Origin.POLICY) -> tuple[list[Any], Status]:
    return [(one, origin) for one in contents], Status.COMPLETED


def test_wrong_trajectories_are_paid_for_their_calls() -> None:
    tree = make_tree(
        path(SEARCH, SEARCH, WRONG),
        path(SEARCH, RIGHT),
        path(WRONG),
        path(*[SEARCH] * 7, WRONG),
        path(UNANSWERED, WRONG),
        path(SEARCH, WRONG, origin=Origin.RETRIEVED),
    )
    # Two calls; a right one; none; no more than five; a call without a result; another agent's.
    assert call_bonus(trajectories=tree.trajectories()) == [2.0, 0.0, 0.0, 5.0, 0.0, 0.0]


def test_a_call_that_fewer_make_is_worth_more() -> None:
    tree = make_tree(
        path(SEARCH, WRONG), path(SEARCH, SEARCH, OTHER, RIGHT), path(SEARCH, WRONG), path(WRONG)
    )
    third = 1 / sqrt(3)
    assert call_novelty(trajectories=tree.trajectories()) == pytest.approx(
        [third, (2 * third + 1) / 3, third, 0.0]
    )
    assert own_calls(tree.trajectories()[1]) == [
        ("search", "q"),
        ("search", "q"),
        ("search", "another"),
    ]


def test_recipes_name_them_with_weights() -> None:
    settings = RewardSettings(funcs=["hierarchical", "call_bonus"], weights=[1.0, 0.1])
    names = [(name, weight) for name, _, weight in build_rewards(settings, max_tokens=64)]
    assert names == [("hierarchical", 1.0), ("call_bonus", 0.1)]
    scorer = RewardScorer(
        build_rewards(settings, max_tokens=64), written_text=lambda ids: "", deadline_s=10
    )
    tree = make_tree(path(SEARCH, SEARCH, WRONG), path(SEARCH, RIGHT))
    assert [leaf.reward for leaf in asyncio.run(scorer(tree)).leaves] == [0.2, 1.0]
