"""A credit rule of the user's own: by hand on a small tree, and what it must not do."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from tests.support.error_codes import raises_code
from tests.support.trees import Part, build_tree

from treegraft.algo.advantages import assign_credit
from treegraft.core.errors import SettingError
from treegraft.core.types import Status, Tree
from treegraft.policy.learn.credit import credit_trees, find_credit
from treegraft.policy.learn.pack import pack_trees
from treegraft.runs.tree_json import tree_from_json, tree_to_json
from treegraft.settings.config import Config
from treegraft.settings.load import load_config

NAMED = Config.model_validate({"credit": {"rule": "mine:rule"}})


def small_tree() -> Tree:
    """A start that branches into a right and a wrong answer, and a start that failed."""
    first = Part("sst", (Part("s", reward=1.0), Part("ss", reward=0.0)))
    return build_tree(Part("p", (first, Part("s", reward=None, status=Status.FAILED))))


def signs(tree: Tree) -> Tree:
    """Advantage 2 for what was right and -1 for what was wrong; the shared step carries 0.25."""
    leaves = [
        replace(leaf, advantage=2.0 if leaf.reward else -1.0) if leaf.reward is not None else leaf
        for leaf in tree.leaves
    ]
    steps = [replace(step, advantage=0.25) if step.id == "0.0" else step for step in tree.steps]
    return replace(tree, leaves=tuple(leaves), steps=tuple(steps))


def test_without_a_rule_the_settings_decide() -> None:
    tree = small_tree()
    config = load_config({"credit": {"advantage": "dr_grpo"}})
    assert find_credit(config).rule is None
    assert credit_trees([tree], config) == [assign_credit(tree, advantage="dr_grpo")]
    assert [leaf.advantage for leaf in credit_trees([tree], config)[0].leaves] == [0.5, -0.5, None]


def test_a_batch_is_compared_as_a_whole() -> None:
    """Trees of rewards 1, 0 and 1, 1; tokens 3, 4 and 1, 1: over nine tokens mean 5/9, variance
    (5 · (4/9)² + 4 · (5/9)²) / 8."""
    other = build_tree(Part("p", (Part("s", reward=1.0), Part("s", reward=1.0))), task_id="t/2")
    config = load_config({"credit": {"advantage": "reinforce++"}})
    first, second = credit_trees([small_tree(), other], config)
    spread = math.sqrt((5 * 16 / 81 + 4 * 25 / 81) / 8)
    right = 4 / 9 / spread
    wrong = -5 / 9 / spread
    assert [leaf.advantage for leaf in first.leaves] == [
        pytest.approx(right),
        pytest.approx(wrong),
        None,
    ]
    assert [leaf.advantage for leaf in second.leaves] == [pytest.approx(right)] * 2


def test_the_rule_reaches_the_tokens_by_hand() -> None:
    """Contributions in order of the leaves: two shared tokens and one own; two shared and two own;
    nothing of the failed one."""
    (tree,) = credit_trees([small_tree()], NAMED, find_credit(NAMED, signs))
    assert [leaf.weight for leaf in tree.leaves] == [0.5, 0.5, 0.0]
    batch = pack_trees([tree])
    assert batch.carries_loss[batch.trajectories == 2].tolist() == [False]
    found = sorted(zip(batch.trajectories.tolist(), batch.advantages.tolist(), strict=True))
    assert found == [
        (0, 0.25),
        (0, 0.25),
        (0, 2.0),
        (1, -1.0),
        (1, -1.0),
        (1, 0.25),
        (1, 0.25),
        (2, 0.0),
    ]


def test_a_rule_sees_the_credit_of_the_settings() -> None:
    seen: list[Tree] = []
    found = find_credit(NAMED, lambda tree: seen.append(tree) or tree)
    credit_trees([small_tree()], NAMED, found)
    assert seen == [assign_credit(small_tree())]


def other_reward(tree: Tree) -> Tree:
    return replace(tree, leaves=tuple(replace(leaf, reward=1.0) for leaf in tree.leaves))


def failing(tree: Tree) -> Tree:
    raise KeyError("0.7")


def with_advantage(value: float | None) -> Callable[[Tree], Tree]:
    return lambda tree: replace(
        tree, leaves=tuple(replace(leaf, advantage=value) for leaf in tree.leaves)
    )


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda tree: None, "got a NoneType, expected the tree"),
        (failing, "it failed with KeyError: '0.7'"),
        (other_reward, "differs in more than advantages"),
        (with_advantage(math.nan), "leaf '0.0.0' has advantage nan; expected a finite number"),
        (with_advantage(None), "leaf '0.0.0' has advantage None; expected a finite number"),
        (with_advantage(1.0), "leaf '0.1' has advantage 1.0; expected a finite number, or None of"),
        (
            lambda tree: replace(
                tree, steps=tuple(replace(step, advantage=math.inf) for step in tree.steps)
            ),
            "step '0' has advantage inf and credit_factors (); expected finite numbers",
        ),
    ],
)
def test_refusals(rule: Callable[[Tree], Tree], message: str) -> None:
    with pytest.raises(SettingError) as caught:
        credit_trees([small_tree()], NAMED, find_credit(NAMED, rule))
    assert "credit.rule 'mine:rule', tree " in str(caught.value)
    assert message in str(caught.value)


def test_a_rule_that_is_not_there_is_refused() -> None:
    for name, code in [
        ("rank", "unknown-name"),
        ("math:ranks", "import-name-missing"),
        ("math:pi", "credit-name-invalid"),
    ]:
        with raises_code(code):
            find_credit(load_config({"credit": {"rule": name}}))


@pytest.mark.parametrize("setting", ["advantage", "attribution"])
def test_what_credit_names_is_missed_before_the_work(setting: str) -> None:
    for name, code in [
        ("no_such_module:f", "import-module-missing"),
        ("math:pi", "credit-name-invalid"),
    ]:
        with raises_code(code, f"credit.{setting}"):
            find_credit(load_config({"credit": {setting: name}}))


def test_numbers_of_numpy_become_those_that_json_holds() -> None:
    """Trees go to other ranks as JSON, in which a float32 would be text."""

    def rule(tree: Tree) -> Tree:
        leaves = tuple(
            replace(leaf, advantage=None if leaf.reward is None else np.float32(0.5))
            for leaf in tree.leaves
        )
        steps = tuple(replace(step, advantage=np.float32(0.25)) for step in tree.steps)
        return replace(tree, leaves=leaves, steps=steps)

    [found] = credit_trees([small_tree()], NAMED, find_credit(NAMED, rule))
    read = tree_from_json(tree_to_json(found))
    assert [leaf.advantage for leaf in read.leaves] == [0.5, 0.5, None]
    assert {step.advantage for step in read.steps} == {0.25}
