"""Nearest vectors, exactly, by a matrix product.

What is found depends on the stored vectors alone, never on the other queries of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_MARGIN = 1e-4
"""More than float32 matrix products of unit vectors differ by; rows nearer than this to the k-th
best are scored again."""
QUERIES = 64
"""Queries that share one matrix product."""

Mask = npt.NDArray[np.bool_]
"""[rows] True for those to choose from."""
Vectors = npt.NDArray[np.float32]
"""[rows, dim] of unit length."""
Hits = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]
"""Rows, best first, and their similarities."""

NOTHING: Hits = (np.zeros(0, np.int64), np.zeros(0, np.float64))


def score(
    vectors: npt.NDArray[np.floating[Any]],
    rows: npt.NDArray[np.int64],
    query: npt.NDArray[np.float32],
    k: int,
) -> Hits:
    """Returns the k best of these rows: cosine to six decimals, best first, the earlier row if two
    are equal.

    The sums run row by row in float64, so that a similarity does not depend on the other rows;
    rounding removes the error in the length of float32 vectors, so that equal texts have 1.
    """
    products = vectors[rows].astype(np.float64) * query.astype(np.float64)
    similarities = np.clip(products.sum(axis=1).round(6), -1.0, 1.0)
    order = np.lexsort((rows, -similarities))[:k]
    return rows[order], similarities[order]


def search_exactly(
    vectors: Vectors, queries: npt.NDArray[np.float32], eligible: Sequence[Mask], k: int
) -> list[Hits]:
    """Returns for each query the k nearest rows among its eligible ones; fewer if fewer are
    eligible.

    Args:
        queries: [queries, dim] of unit length.
        eligible: [queries][rows].
    """
    found: list[Hits] = []
    for first in range(0, len(queries), QUERIES):
        some = queries[first : first + QUERIES]
        masks = eligible[first : first + QUERIES]
        for query, products, mask in zip(some, some @ vectors.T, masks, strict=True):
            num = min(k, int(np.count_nonzero(mask)))
            if num == 0:
                found.append(NOTHING)
                continue
            rough = np.where(mask, products, -np.inf)
            threshold = rough.max() if num == 1 else np.partition(rough, -num)[-num]
            # The last bits of a product depend on the other queries in it, so the choice among
            # rows near the threshold is left to `score`.
            found.append(score(vectors, np.flatnonzero(rough >= threshold - _MARGIN), query, num))
    return found
