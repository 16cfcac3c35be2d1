"""Tree-GRPO's credit by hand."""

from __future__ import annotations

import math

import pytest
from tests.support.trees import Part, build_tree

from treegraft.algo.advantages import assign_credit
from treegraft.extras.methods.tree_grpo_credit import forest_advantages
from treegraft.extras.methods.tree_search import TREE_GRPO


def test_tree_grpo_by_hand() -> None:
    """Start 0 has rewards 1 and 0, start 1 only 0, start 2 twice 1.

    Within start 0: mean 1/2, deviation 1/√2, so ± 1/√2; the others 0. Over the task: mean 3/5,
    variance (3 · .16 + 2 · .36) / 4 = .3.
    """
    right = 0.4 / math.sqrt(0.3)
    wrong = -0.6 / math.sqrt(0.3)
    found = forest_advantages([1, 0, 0, 1, 1], [0, 0, 1, 2, 2], eps=1e-15)
    half = 1 / math.sqrt(2)
    assert found.tolist() == pytest.approx([right + half, wrong - half, wrong, right, right])
    # The same by the tree's own starts.
    first = Part.of("s", Part("s", reward=1.0), Part("s", reward=0.0))
    last = Part.of("s", Part("s", reward=1.0), Part("s", reward=1.0))
    tree = build_tree(Part.of("p", first, Part("s", reward=0.0), last))
    leaves = assign_credit(tree, advantage=TREE_GRPO, eps=1e-15).leaves
    assert [leaf.advantage for leaf in leaves] == pytest.approx(found.tolist())
