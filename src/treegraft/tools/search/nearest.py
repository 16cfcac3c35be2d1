"""Nearest vectors: exactly by a matrix product, or about as well by lists around centroids (IVF)
where there are many.

Up to `FLAT_LIMIT` eligible traces a search is exact. Above, a FAISS IVF index over 8-bit copies of
the vectors proposes candidates, the rows that it does not hold yet are searched exactly, and all of
them are scored again with the stored vectors. The results of a search depend on the rows alone,
never on when or in which steps the index was built, or on the other queries of a batch: the numbers
of rows that the index holds and that centroids are fitted to are functions of the number of rows,
rows are assigned in fixed blocks, and every query is answered alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

FLAT_LIMIT = 20_000
"""Eligible traces up to which a search is exact."""
_MARGIN = 1e-4
"""More than the rounding of a float32 matrix product of unit vectors; rows within this of the k-th
best are scored again."""
QUERIES = 64
"""Queries that share one matrix product."""

BLOCK = 2_048
"""Rows that enter the index together."""
LISTS_PER_ROOT = 2.5
"""Lists for each square root of the rows that centroids are fitted to, rounded to a power of two:
1,024 for 160,000."""
POINTS_PER_LIST = 64
"""Rows of the sample that centroids are fitted to, for each list."""
NUM_ROUNDS = 10
"""Of k-means."""
NUM_PROBES = 32
"""Lists that a query reads."""
NUM_CANDIDATES = 32
"""Rows that are scored again, besides four for each one wanted."""

Mask = npt.NDArray[np.bool_]
"""[rows] which of them count."""
Vectors = npt.NDArray[np.float32]
"""[rows, dim] of unit length."""
Found = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]
"""Rows, best first, and their similarities."""

NOTHING: Found = (np.zeros(0, np.int64), np.zeros(0, np.float64))


def score(
    vectors: npt.NDArray[np.floating[Any]],
    rows: npt.NDArray[np.int64],
    query: npt.NDArray[np.float32],
    k: int,
) -> Found:
    """Returns the k best of these rows: cosine to six decimals, best first, the earlier row where
    two are equal.

    The sums run row by row in float64, so that a similarity does not depend on the other rows;
    rounding removes the error of float32 vectors whose length is not exactly 1, so that equal texts
    have a similarity of 1.
    """
    products = vectors[rows].astype(np.float64) * query.astype(np.float64)
    similarities = np.clip(products.sum(axis=1).round(6), -1.0, 1.0)
    order = np.lexsort((rows, -similarities))[:k]
    return rows[order], similarities[order]


def search_exactly(
    vectors: npt.NDArray[np.float32],
    queries: npt.NDArray[np.float32],
    eligible: Sequence[Mask],
    k: int,
) -> list[Found]:
    """Returns for each query the k nearest of its eligible rows, or all of these where there are
    fewer.

    Args:
        vectors: [rows, dim] of unit length.
        queries: [queries, dim] of unit length.
        eligible: [queries][rows].
    """
    found: list[Found] = []
    for first in range(0, len(queries), QUERIES):
        some = queries[first : first + QUERIES]
        for query, row, mask in zip(
            some, some @ vectors.T, eligible[first : first + QUERIES], strict=True
        ):
            found.append(_best(vectors, query, row, mask, k))
    return found


def _best(
    vectors: npt.NDArray[np.float32],
    query: npt.NDArray[np.float32],
    rough: npt.NDArray[np.float32],
    eligible: Mask,
    k: int,
) -> Found:
    rough = np.where(eligible, rough, -np.inf)
    num = min(k, int(np.count_nonzero(eligible)))
    if num == 0:
        return NOTHING
    threshold = rough.max() if num == 1 else np.partition(rough, -num)[-num]
    return score(vectors, np.flatnonzero(rough >= threshold - _MARGIN), query, num)


def search_rows(
    vectors: Vectors,
    index: IvfIndex | None,
    queries: npt.NDArray[np.float32],
    base: Mask,
    eligible: Sequence[Mask],
    k: int,
) -> list[Found]:
    """Returns for each query the k nearest of its eligible rows, by the index where that is faster.

    Args:
        base: [rows] eligible before a query's own exclusions; every mask of `eligible` is a subset.
        index: None means search exactly.
    """
    num = int(np.count_nonzero(base))
    if index is not None and num > FLAT_LIMIT:
        return [
            index.search(vectors, query, mask, k)
            for query, mask in zip(queries, eligible, strict=True)
        ]
    if 2 * num >= len(vectors):
        return search_exactly(vectors, queries, eligible, k)
    few = np.flatnonzero(base)
    found = search_exactly(vectors[few], queries, [mask[few] for mask in eligible], k)
    return [(few[places], similarities) for places, similarities in found]


# ---------------------------------------------------------------------- lists around centroids


def num_indexed(num_rows: int) -> int:
    """Returns the number of first rows that the index holds; the rest is searched exactly."""
    return num_rows - num_rows % BLOCK if num_rows > FLAT_LIMIT else 0


def num_fitted(num_rows: int) -> int:
    """Returns the number of first rows that centroids are fitted to: the largest FLAT_LIMIT times a
    power of two."""
    return FLAT_LIMIT << ((num_rows // FLAT_LIMIT).bit_length() - 1)


class IvfIndex:
    """8-bit copies of the first rows in lists around centroids; a query reads the lists nearest to
    it."""

    def __init__(self, faiss_index: Any, fitted: int) -> None:
        self.faiss_index = faiss_index
        self.num_rows = int(faiss_index.ntotal)
        self.num_fitted = fitted

    @classmethod
    def build(
        cls, vectors: Vectors, before: IvfIndex | None, is_stopped: Callable[[], bool]
    ) -> IvfIndex | None:
        """Returns an index of the first `num_indexed` rows, or None where it was stopped.

        Args:
            before: an index of fewer of the same rows; a copy of it is extended where its centroids
                are still those to use.
            is_stopped: called about once a second.
        """
        faiss = _faiss()
        # For this thread only: a sum over several threads depends on their number.
        faiss.omp_set_num_threads(1)
        end, fitted = num_indexed(len(vectors)), num_fitted(len(vectors))
        if before is not None and before.num_fitted == fitted:
            index, start = faiss.clone_index(before.faiss_index), before.num_rows
        else:
            index, start = fit(vectors[:fitted], is_stopped), 0
        for first in range(start, end, BLOCK):
            if is_stopped():
                return None
            # Always the same blocks: the shape of a product decides its last bits.
            index.add(vectors[first : first + BLOCK])
        return cls(index, fitted)

    @classmethod
    def from_bytes(cls, data: npt.NDArray[np.uint8], fitted: int) -> IvfIndex:
        """Returns the index that `to_bytes` wrote."""
        return cls(_faiss().deserialize_index(data), fitted)

    def to_bytes(self) -> npt.NDArray[np.uint8]:
        """Returns the index as FAISS writes it."""
        data: npt.NDArray[np.uint8] = _faiss().serialize_index(self.faiss_index)
        return data

    def search(
        self, vectors: Vectors, query: npt.NDArray[np.float32], eligible: Mask, k: int
    ) -> Found:
        """Returns the k nearest eligible rows: nearly always the very nearest, and k of them
        wherever there are k."""
        faiss = _faiss()
        bits = np.packbits(eligible[: self.num_rows], bitorder="little")
        selector = faiss.IDSelectorBitmap(bits)
        parameters = faiss.SearchParametersIVF(sel=selector, nprobe=NUM_PROBES)
        _, near = self.faiss_index.search(query[None], NUM_CANDIDATES + 4 * k, params=parameters)
        newest = self.num_rows + np.flatnonzero(eligible[self.num_rows :])
        candidates = np.concatenate([near[0][near[0] >= 0], newest])
        if len(candidates) < k:
            return search_exactly(vectors, query[None], [eligible], k)[0]
        return score(vectors, candidates, query, k)


def fit(vectors: npt.NDArray[np.floating[Any]], is_stopped: Callable[[], bool]) -> Any:
    """Returns an empty FAISS index with centroids and 8-bit ranges fitted to these vectors, or None
    where it was stopped. Only a sample of the vectors is read, so they may lie in a file.
    """
    faiss = _faiss()
    num, dim = vectors.shape
    num_lists = 1 << round(math.log2(LISTS_PER_ROOT * math.sqrt(num)))
    # Evenly spread rather than drawn: neighbours in the file are steps of one task.
    sample = vectors[
        np.linspace(0, num - 1, min(num, POINTS_PER_LIST * num_lists)).astype(np.int64)
    ].astype(np.float32)
    centroids = sample[np.linspace(0, len(sample) - 1, num_lists).astype(np.int64)].copy()
    clustering = faiss.ClusteringParameters()
    clustering.spherical, clustering.niter, clustering.seed = True, 1, 1
    clustering.min_points_per_centroid, clustering.max_points_per_centroid = 1, 2 * POINTS_PER_LIST
    quantizer = faiss.IndexFlatIP(dim)
    # One round at a time, so that closing a buffer does not wait for long.
    for _ in range(NUM_ROUNDS):
        if is_stopped():
            return None
        rounds = faiss.Clustering(dim, num_lists, clustering)
        faiss.copy_array_to_vector(centroids.ravel(), rounds.centroids)
        quantizer.reset()
        rounds.train(sample, quantizer)
        centroids = faiss.vector_to_array(rounds.centroids).reshape(num_lists, dim)
    quantizer.reset()
    quantizer.add(centroids)
    index = faiss.IndexIVFScalarQuantizer(
        quantizer, dim, num_lists, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT, False
    )
    index.train(sample)
    # The index keeps a bare pointer.
    index.own_fields = True
    quantizer.this.disown()
    return index


def _faiss() -> Any:
    """Returns the library; imported here since few runs need it, and untyped since its stubs lack
    most arguments."""
    import faiss

    return faiss
