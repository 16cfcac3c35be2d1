"""Nearest vectors: exactly by a matrix product, or nearly so by lists around centroids (IVF) where
there are many.

Up to `FLAT_LIMIT` eligible rows a search is exact. Above, a FAISS IVF index over 8-bit copies of
the vectors proposes candidates, the rows behind the index are scored exactly, and all candidates
are scored again with the stored vectors. The result depends on the rows alone, never on when the
index was built, on the additions by which it grew, or on the other queries of a batch: the rows
indexed and the rows that centroids are fitted to are functions of the number of rows, rows are
assigned in fixed blocks, and every query is answered alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from treegraft.core.packages import require

FLAT_LIMIT = 20_000
"""Eligible rows up to which a search is exact."""
_MARGIN = 1e-4
"""More than float32 matrix products of unit vectors differ by; rows nearer than this to the k-th
best are scored again."""
QUERIES = 64
"""Queries that share one matrix product."""

BLOCK = 2_048
"""Rows that enter the index together."""
NUM_PROBES = 32
"""Lists that a query looks at."""
NUM_CANDIDATES = 32
"""Rows that are scored again, besides four for each one wanted."""


@dataclass(frozen=True, slots=True)
class Fitting:
    """How many centroids there are, and the effort spent on them."""

    lists_per_root: float
    """Lists for each square root of the rows that centroids are fitted to, rounded to a power of
    two."""
    points_per_list: int
    """Rows of the sample that centroids are fitted to, for each list."""
    num_rounds: int
    """Of k-means."""


ON_DISK = Fitting(lists_per_root=2.5, points_per_list=64, num_rounds=10)
"""For an index that is made once and kept: 1,024 lists for 160,000 rows, 9 s on one core."""
IN_MEMORY = Fitting(lists_per_root=1.25, points_per_list=32, num_rounds=4)
"""For an index that each process makes anew: 512 lists for 160,000 rows, 1.6 s on one core at the
same recall, since each list is longer."""

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
    """Returns the k best of these rows: cosine to six decimals, best first, the earlier row where
    two are equal.

    The sums run row by row in float64, so that a similarity does not depend on the other rows;
    rounding removes the error in the length of float32 vectors, so that equal texts have 1.
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
) -> list[Hits]:
    """Returns for each query the k nearest rows among its eligible ones; fewer where fewer are
    eligible.

    Args:
        vectors: [rows, dim] of unit length.
        queries: [queries, dim] of unit length.
        eligible: [queries][rows].
    """
    found: list[Hits] = []
    for first in range(0, len(queries), QUERIES):
        some = queries[first : first + QUERIES]
        for query, products, mask in zip(
            some, some @ vectors.T, eligible[first : first + QUERIES], strict=True
        ):
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


def search_rows(
    vectors: Vectors,
    index: IvfIndex | None,
    queries: npt.NDArray[np.float32],
    base: Mask,
    eligible: Sequence[Mask],
    k: int,
) -> list[Hits]:
    """Returns for each query the k nearest rows among its eligible ones, by the index where
    that is faster.

    Args:
        index: None means search exactly.
        base: [rows] those that are eligible before a query's own exclusions; every mask of
            `eligible` is a part of it.
    """
    num = int(np.count_nonzero(base))
    if index is not None and num > FLAT_LIMIT:
        return [
            index.search(vectors, query, mask, k)
            for query, mask in zip(queries, eligible, strict=True)
        ]
    # Copying the eligible rows pays off only where they are few.
    if 2 * num >= len(vectors):
        return search_exactly(vectors, queries, eligible, k)
    few = np.flatnonzero(base)
    found = search_exactly(vectors[few], queries, [mask[few] for mask in eligible], k)
    return [(few[places], similarities) for places, similarities in found]


# ---------------------------------------------------------------------- lists around centroids


def num_indexed(num_rows: int) -> int:
    """Returns the number of first rows that the index holds; the others are searched exactly."""
    return num_rows - num_rows % BLOCK if num_rows > FLAT_LIMIT else 0


def num_fitted(num_rows: int) -> int:
    """Returns the number of first rows that centroids are fitted to: the largest FLAT_LIMIT times a
    power of two."""
    return FLAT_LIMIT << ((num_rows // FLAT_LIMIT).bit_length() - 1)


class IvfIndex:
    """8-bit copies of the first rows in lists around centroids: a query looks at the lists nearest
    to it. An index is never changed once it is built."""

    def __init__(self, faiss_index: Any, fitted: int) -> None:
        self.faiss_index = faiss_index
        self.num_rows = int(faiss_index.ntotal)
        self.num_fitted = fitted

    @classmethod
    def build(cls, vectors: Vectors, before: IvfIndex | None = None) -> IvfIndex:
        """Returns an index of the first `num_indexed` rows.

        Args:
            before: an index of some of the same rows. It is returned where it suffices, and copied
                and extended where its centroids are still the right ones.
        """
        faiss = load_faiss()
        end, fitted = num_indexed(len(vectors)), num_fitted(len(vectors))
        is_fit = before is not None and before.num_fitted == fitted
        if before is not None and is_fit and before.num_rows >= end:
            return before
        # A sum over several threads would depend on their number, which is this thread's own.
        num_threads = faiss.omp_get_max_threads()
        faiss.omp_set_num_threads(1)
        try:
            if before is not None and is_fit:
                index, start = faiss.clone_index(before.faiss_index), before.num_rows
            else:
                index, start = fit(vectors[:fitted], IN_MEMORY), 0
            for first in range(start, end, BLOCK):
                # The same blocks on every route: how a product is cut up decides its last bits.
                index.add(vectors[first : first + BLOCK])
        finally:
            faiss.omp_set_num_threads(num_threads)
        return cls(index, fitted)

    def search(
        self, vectors: Vectors, query: npt.NDArray[np.float32], eligible: Mask, k: int
    ) -> Hits:
        """Returns k eligible rows, nearly always the nearest; fewer only where fewer are
        eligible."""
        faiss = load_faiss()
        bits = np.packbits(eligible[: self.num_rows], bitorder="little")
        selector = faiss.IDSelectorBitmap(bits)
        parameters = faiss.SearchParametersIVF(sel=selector, nprobe=NUM_PROBES)
        _, near = self.faiss_index.search(query[None], NUM_CANDIDATES + 4 * k, params=parameters)
        # Fewer than BLOCK rows stand behind the index, so these are scored without a choice.
        newest = self.num_rows + np.flatnonzero(eligible[self.num_rows :])
        candidates = np.concatenate([near[0][near[0] >= 0], newest])
        # The lists that were read may hold too few of a rare kind of row.
        if len(candidates) < k:
            return search_exactly(vectors, query[None], [eligible], k)[0]
        return score(vectors, candidates, query, k)


def fit(vectors: npt.NDArray[np.floating[Any]], fitting: Fitting) -> Any:
    """Returns an empty FAISS index with centroids and 8-bit ranges fitted to these vectors.

    Only a sample of the vectors is read, so they may lie in a file.
    """
    faiss = load_faiss()
    num, dim = vectors.shape
    num_lists = 1 << round(math.log2(fitting.lists_per_root * math.sqrt(num)))
    # Evenly spread instead of drawn: neighbours in the file are steps of one task.
    num_sampled = min(num, fitting.points_per_list * num_lists)
    sample = vectors[np.linspace(0, num - 1, num_sampled).astype(np.int64)].astype(np.float32)
    centroids = sample[np.linspace(0, num_sampled - 1, num_lists).astype(np.int64)]
    clustering = faiss.Clustering(dim, num_lists)
    clustering.spherical, clustering.niter, clustering.seed = True, fitting.num_rounds, 1
    clustering.min_points_per_centroid = 1  # else it warns of fewer than 39
    faiss.copy_array_to_vector(centroids.ravel(), clustering.centroids)
    quantizer = faiss.IndexFlatIP(dim)
    clustering.train(sample, quantizer)
    centroids = faiss.vector_to_array(clustering.centroids).reshape(num_lists, dim)
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


def load_faiss() -> Any:
    """Returns the library, untyped, since its stubs lack most arguments."""
    # A buffer under FLAT_LIMIT rows never needs it, and its import takes a while.
    require(f"a search among more than {FLAT_LIMIT:,} vectors, or a dense index,", "faiss")
    import faiss

    return faiss
