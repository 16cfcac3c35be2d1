"""Shapes and ways of the learner's measurements: sizes on paper, and the same gradients."""

from __future__ import annotations

import pytest
import torch
from benchmarks.arms import ROWS, arms, distance, gradients
from benchmarks.card.bench import Bench
from benchmarks.workloads import Segment, Workload, apart, prompt_once, workloads

from treegraft.policy.learn.pack import num_tree_tokens

TEXT = list(range(3, 500))


def test_counts_by_hand() -> None:
    """Two trees of 3 prompt tokens and two leaves of 2, of which one is sampled: 7 tokens of 10,
    6 + 2 (6 + 3) = 24 pairs of 2 (15) = 30."""
    leaf = Segment(2, 1)
    load = Workload("by hand", (Segment(3, below=(leaf, leaf)),) * 2)
    assert load.unique == (14, 48, 4)
    assert load.flat == (20, 60, 4)
    assert load.ratio == 20 / 14


def test_the_shapes_have_the_sizes_that_they_are_named_for() -> None:
    """D: 2,000 + 2 (2,550 + 8 · 850) of 16 · 5,400. S: 2,000 + 19 · 660 + 20 · 460, and rows of
    2,460 + 660 t. C: 600 + 4 (2,380 + 4 · 1,020). A: 600 + 8 (1,700 + 2 · 1,700)."""
    sizes = {name: (load.unique.tokens, load.flat.tokens) for name, load in workloads().items()}
    assert sizes == {
        "D": (20_700, 86_400),
        "S": (23_740, 174_600),
        "C": (26_440, 64_000),
        "A": (41_400, 64_000),
        "G": (21_600, 21_600),
    }


@pytest.mark.parametrize("name", list(workloads()))
def test_trajectories_are_the_same_in_every_layout(name: str) -> None:
    load = workloads(1 / 200)[name]
    trees = load.trees(TEXT)
    assert sum(map(num_tree_tokens, trees)) == load.unique.tokens
    rows, shared = apart(trees), prompt_once(trees)
    assert sum(map(num_tree_tokens, rows)) == load.flat.tokens

    def paths(some: list) -> list:
        return [
            (path.token_ids, path.sampled_mask, path.leaf.advantage)
            for tree in some
            for path in tree.trajectories()
        ]

    assert paths(rows) == paths(shared) == paths(trees)


@pytest.mark.parametrize("name", list(workloads()))
def test_every_way_has_the_gradient_of_rows(name: str) -> None:
    """In float32, in micro-batches that hold some of the rows each and cut the larger trees."""
    load = workloads(1 / 100)[name]
    model = Bench(ends_s=60.0, is_tiny=True).model("qwen2.5-1.5b", torch.float32)
    makers = arms(model, load.trees(TEXT), 300)
    expected = gradients(model, makers[ROWS]())
    for way, make in makers.items():
        assert distance(gradients(model, make()), expected) < 1e-5, way
