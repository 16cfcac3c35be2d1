"""The benchmark of signs of step credit: moves against exact distances, measured advantages and
shares, on paper."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.credit_sign import (
    COLUMNS,
    counted,
    direction,
    moves_of,
    node_credit,
    with_interval,
)
from tests.support.trees import Part, build_tree

from treegraft.core.types import Observation, Origin, StepContent, Task, ToolCall, Tree

QUESTION = "3x3 player a2 boxes b2 goals c2"


def played(tree: Tree, *moves: str) -> Tree:
    """The tree with these moves as its steps with a result, in depth-first order."""
    given = iter(moves)
    task = Task(id="t", question=QUESTION, reference=())
    steps = [
        replace(
            step,
            content=StepContent(
                calls=(ToolCall("move", next(given)),), observations=(Observation(text="seen"),)
            ),
        )
        if step.num_by(Origin.TOOL)
        else step
        for step in tree.steps
    ]
    return replace(tree, task=task, steps=tuple(steps))


def test_moves_are_judged_by_exact_distances() -> None:
    """The player is left of the box, and the goal right of it: one push solves. Up costs two moves;
    pushed down at the left edge of the board the box is out of reach of the goal."""
    line = Part.of("p", Part.of("st", Part.of("st", Part.of("st", Part("s", reward=1.0)))))
    solving = played(build_tree(line), "up", "down", "right")
    (path,) = solving.trajectories()
    assert [kind for _, kind in moves_of(path)] == ["wrong", "right", "right"]
    # Pushed from above to the lower edge, which has no goal. After that nothing is right or wrong.
    losing = played(build_tree(line), "up", "right", "down")
    (path,) = losing.trajectories()
    assert [kind for _, kind in moves_of(path)] == ["wrong", "wrong", "fatal"]
    more = Part.of("p", Part.of("st", Part.of("st", Part.of("st", Part.of("st", Part("s"))))))
    (path,) = played(build_tree(more), "up", "right", "down", "left").trajectories()
    assert [kind for _, kind in moves_of(path)][-1] == ""


def test_contributions_are_counted_by_kind_and_sign() -> None:
    """Two leaves share the first move: it counts twice, once with each one's advantage."""
    tree = played(
        build_tree(
            Part.of(
                "p",
                Part.of("st", Part.of("st", Part("s", reward=1.0)), Part.of("st", Part("s"))),
            )
        ),
        "up",
        "down",
        "up",
    )
    tree = replace(
        tree,
        leaves=tuple(
            replace(leaf, advantage=sign)
            for leaf, sign in zip(tree.leaves, (0.5, -0.5), strict=True)
        ),
    )
    first = tree.steps[1].id
    optimal, agent = counted(tree, lambda step, path: step.advantage_below(path.leaf), {first: 1})
    # "up" at the upper edge changes nothing.
    assert optimal == {"wrong+": 1, "wrong-": 2, "right+": 1}
    assert agent == {"up+": 1, "up-": 1}
    line = {"optimal": dict(optimal)}
    assert with_interval([line], *COLUMNS["accuracy"]) == "75 [75, 75]"
    assert with_interval([line], *COLUMNS["precision of +"]) == "50 [50, 50]"
    assert with_interval([line], *COLUMNS["fatal with -"]) == "-"


def test_a_node_is_compared_with_its_siblings() -> None:
    tree = build_tree(
        Part.of(
            "p",
            Part.of("s", Part("s", reward=1.0), Part("s", reward=0.0)),
            Part("s", reward=0.0),
        )
    )
    # 1/2 below the first start against 0; its children 1 against 0; the second start 0 against 1/2.
    assert node_credit(tree) == {"0.0": 0.5, "0.0.0": 1.0, "0.0.1": -1.0, "0.1": -0.5}


@pytest.mark.parametrize(
    ("after", "before", "expected"),
    [
        # Shares of 16 with two added: 17/18 and 1/18, variance .0029 each, two errors .15.
        ((1.0, 16), (0.0, 16), 1),
        ((0.0, 16), (1.0, 16), -1),
        # .5 and .69: variances .0139 and .0123, two errors .32.
        ((0.6875, 16), (0.5, 16), 0),
    ],
)
def test_a_difference_counts_from_two_standard_errors(
    after: tuple[float, int], before: tuple[float, int], expected: int
) -> None:
    assert direction(after, before) == expected
