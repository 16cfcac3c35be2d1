"""Nearest vectors: against a loop, and in a buffer."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.examples import at_most

from treegraft.tools.search.nearest import search_exactly

DIM = 16
NUM = 8_000
NUM_CLUSTERS = 300
Vectors = npt.NDArray[np.float32]


def unit(vectors: npt.NDArray[np.float64]) -> Vectors:
    return (vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)).astype(np.float32)


@pytest.fixture(scope="module")
def vectors() -> Vectors:
    """[NUM + 200, DIM] around NUM_CLUSTERS centres; the last 200 are for queries."""
    draw = np.random.default_rng(0)
    centres = draw.normal(size=(NUM_CLUSTERS, DIM))
    return unit(
        centres[draw.integers(0, NUM_CLUSTERS, NUM + 200)]
        + 0.5 * draw.normal(size=(NUM + 200, DIM))
    )


# ---------------------------------------------------------------------- exactly


@at_most(60)
@given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 70), st.integers(0, 2**32 - 1))
def test_exact_search_agrees_with_sorting(num: int, k: int, num_queries: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    # Coordinates of a few values, so that many rows are equally near.
    stored = unit(draw.integers(1, 3, (num, 3)) * 1.0)
    queries = unit(draw.integers(1, 3, (num_queries, 3)) * 1.0)
    masks = draw.random((num_queries, num)) < 0.7
    found = search_exactly(stored, queries, list(masks), k)
    for query, mask, (places, similarities) in zip(queries, masks, found, strict=True):
        cosines = {
            row: round(sum(float(a) * float(b) for a, b in zip(stored[row], query, strict=True)), 6)
            for row in np.flatnonzero(mask)
        }
        expected = sorted(cosines, key=lambda row: (-cosines[row], row))[:k]
        assert list(places) == expected
        assert list(similarities) == pytest.approx([cosines[row] for row in expected], abs=2e-6)


def test_what_is_found_does_not_depend_on_the_company(vectors: Vectors) -> None:
    queries = vectors[NUM : NUM + 100]
    base = np.arange(NUM) % 3 > 0
    for k in (1, 7):
        together = search_exactly(vectors[:NUM], queries, [base] * 100, k)
        for query, (places, similarities) in zip(queries[:20], together, strict=False):
            alone = search_exactly(vectors[:NUM], query[None], [base], k)[0]
            assert (alone[0] == places).all() and (alone[1] == similarities).all()


# ---------------------------------------------------------------------- in a buffer
