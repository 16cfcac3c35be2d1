"""EAPO's answer leaf on trees by hand."""

from __future__ import annotations

from dataclasses import replace

from tests.extras.test_axpo import retries_of
from tests.extras.test_commit import by_answer, places
from tests.rollout.test_growth import grow, make
from tests.rollout.test_loop import ANSWER, SEARCH

from treegraft import Origin, Tree, load_config
from treegraft.extras.methods.eapo import AnswerLeafSettings, AnswerLeaves
from treegraft.parts import Start


def grown(num_leaves: int, num_starts: int = 2) -> Tree:
    """Every rollout makes three calls and answers rightly; an answer that is begun is right after
    the second result alone."""

    def agent(path: str) -> str:
        if path.endswith("<answer>"):
            word = "w9" if path.count("<result>") == 2 else "w3"
            return f"\\boxed{{ {word} }}</answer>"
        return SEARCH if path.count("<result>") < 3 else ANSWER

    grower = make(
        AnswerLeaves(AnswerLeafSettings(num_starts=num_starts)), agent, num_leaves=num_leaves
    )
    grower.scorer = by_answer
    return grow(grower)


def test_an_answer_stands_beside_each_call_that_followed_a_result() -> None:
    """Two rollouts of three calls: beside the third and the second call of each, the third ones
    first; the first call follows no result."""
    tree = grown(num_leaves=8)
    assert sorted(places(tree)) == ["0.0.0", "0.0.0.0", "0.1.0", "0.1.0.0"]
    answers = retries_of(tree)
    assert sorted(leaf.reward or 0.0 for leaf in tree.leaves) == [0.0] * 2 + [1.0] * 4
    assert all(step.origins[0] == Origin.FORCED and not step.loss_mask[0] for step in answers)
    # No call is made for them, and no second round follows.
    assert tree.budget.num_tool_calls == 6 and len(tree.leaves) == 6


def test_the_leaves_that_are_left_bound_the_answers() -> None:
    assert places(grown(num_leaves=3)) == ["0.0.0.0"]
    assert sorted(places(grown(num_leaves=4))) == ["0.0.0.0", "0.1.0.0"]
    assert places(grown(num_leaves=2)) == []


def test_rollouts_without_a_result_get_none() -> None:
    explorer = AnswerLeaves(AnswerLeafSettings(num_starts=2))
    tree = grow(make(explorer, lambda path: ANSWER, num_leaves=6))
    assert len(tree.leaves) == 2 and explorer.fill(tree, 6) == Start(0)
    failed = replace(tree, leaves=())
    assert explorer.fill(failed, 6) == Start(0)


def test_half_of_the_leaves_are_starts_by_default() -> None:
    config = load_config("demo", ['explorers=["answer_leaf"]', "explore.num_leaves=6"])
    assert config.explore.answer_leaf.num_starts == 3
    assert config.credit.restarts == "together"
