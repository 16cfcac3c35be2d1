"""Shapes and layouts of the learner's measurements: sizes on paper, and the same gradients."""

from __future__ import annotations

import pytest
import torch
from benchmarks.arms import ROWS, arms, distance, gradients
from benchmarks.card.bench import Bench
from benchmarks.workloads import workloads

TEXT = list(range(3, 500))


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
def test_every_way_has_the_gradient_of_rows(name: str) -> None:
    """In float32, in micro-batches that hold some of the rows each and cut the larger trees."""
    load = workloads(1 / 100)[name]
    model = Bench(ends_s=60.0, is_tiny=True).model("qwen2.5-1.5b", torch.float32)
    makers = arms(model, load.trees(TEXT), 300)
    expected = gradients(model, makers[ROWS]())
    for way, make in makers.items():
        assert distance(gradients(model, make()), expected) < 1e-5, way
