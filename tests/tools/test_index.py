"""Nearest vectors: exactly against a loop, by lists around centroids against exactly, and in a
buffer."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import faiss
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.examples import at_most

from treegraft.core.types import Trace
from treegraft.tools.search.nearest import (
    BLOCK,
    FLAT_LIMIT,
    IvfIndex,
    num_fitted,
    num_indexed,
    search_exactly,
    search_rows,
)
from treegraft.traces.buffer import TraceBuffer

DIM, NUM, NUM_CLUSTERS = 16, 43_000, 300
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


@pytest.fixture(scope="module")
def built(vectors: Vectors) -> IvfIndex:
    return IvfIndex.build(vectors[:NUM])


# ---------------------------------------------------------------------- exactly


@at_most(60)
@given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 70), st.integers(0, 2**32 - 1))
def test_exact_search_agrees_with_sorting(num: int, k: int, num_queries: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    # Coordinates of a few values, so that many rows are equally near.
    stored, queries = (
        unit(draw.integers(1, 3, (num, 3)) * 1.0),
        unit(draw.integers(1, 3, (num_queries, 3)) * 1.0),
    )
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


def test_what_is_found_does_not_depend_on_the_company(vectors: Vectors, built: IvfIndex) -> None:
    queries, base = vectors[NUM : NUM + 100], np.arange(NUM) % 3 > 0
    for index, k in ((None, 1), (None, 7), (built, 7)):
        together = search_rows(vectors[:NUM], index, queries, base, [base] * 100, k)
        for query, (places, similarities) in zip(queries[:20], together, strict=False):
            alone = search_rows(vectors[:NUM], index, query[None], base, [base], k)[0]
            assert (alone[0] == places).all() and (alone[1] == similarities).all()


def test_few_eligible_rows_are_searched_exactly(vectors: Vectors, built: IvfIndex) -> None:
    base = np.arange(NUM) % 1000 == 7
    queries = vectors[NUM : NUM + 20]
    exact = search_exactly(vectors[:NUM], queries, [base] * 20, 3)
    found = search_rows(vectors[:NUM], built, queries, base, [base] * 20, 3)
    assert all(
        (a[0] == b[0]).all() and (a[1] == b[1]).all() for a, b in zip(exact, found, strict=True)
    )


# ---------------------------------------------------------------------- lists around centroids


def test_watermarks_are_functions_of_the_number_of_rows() -> None:
    assert (
        num_indexed(FLAT_LIMIT) == 0
        and num_indexed(FLAT_LIMIT + 1) == FLAT_LIMIT - FLAT_LIMIT % BLOCK
    )
    assert num_indexed(45_056) == 45_056 and num_indexed(45_057) == 45_056
    assert [num_fitted(num) for num in (20_001, 39_999, 40_000, 170_000)] == [
        20_000,
        20_000,
        40_000,
        160_000,
    ]


def test_the_index_finds_the_nearest_nearly_always(vectors: Vectors, built: IvfIndex) -> None:
    assert built.num_rows == num_indexed(NUM) < NUM
    queries, everything = vectors[NUM:], np.ones(NUM, bool)
    exact = search_exactly(vectors[:NUM], queries, [everything] * 200, 1)
    found = [built.search(vectors[:NUM], query, everything, 1) for query in queries]
    hits = sum(int(a[1][0] == b[1][0]) for a, b in zip(exact, found, strict=True))
    assert hits >= 195


def test_rows_behind_the_index_are_found(vectors: Vectors, built: IvfIndex) -> None:
    for row in (built.num_rows, NUM - 1):
        places, similarities = built.search(vectors[:NUM], vectors[row], np.ones(NUM, bool), 1)
        assert (places[0], similarities[0]) == (row, 1.0)


def test_only_eligible_rows_are_found_and_as_many_as_wanted(
    vectors: Vectors, built: IvfIndex
) -> None:
    draw = np.random.default_rng(1)
    for share in (0.5, 0.01, 0.0002):
        mask = draw.random(NUM) < share
        for query in vectors[NUM : NUM + 10]:
            places, similarities = built.search(vectors[:NUM], query, mask, 5)
            assert mask[places].all() and len(set(places)) == len(places) == min(
                5, np.count_nonzero(mask)
            )
            assert list(similarities) == sorted(similarities, reverse=True)
    assert len(built.search(vectors[:NUM], vectors[NUM], np.zeros(NUM, bool), 5)[0]) == 0


def test_building_leaves_the_number_of_threads_as_it_was(vectors: Vectors) -> None:
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(3)
    try:
        IvfIndex.build(vectors[: FLAT_LIMIT + 1])
        assert faiss.omp_get_max_threads() == 3
    finally:
        faiss.omp_set_num_threads(before)


def content(index: IvfIndex) -> bytes:
    data: bytes = faiss.serialize_index(index.faiss_index).tobytes()
    return data


def test_every_way_of_growing_ends_in_the_same_index(vectors: Vectors, built: IvfIndex) -> None:
    index: IvfIndex | None = None
    for num in (20_500, 24_000, 40_100, NUM):
        before, index = index, IvfIndex.build(vectors[:num], index)
        assert index.num_rows == num_indexed(num)
        # Searches may still use the one before.
        assert before is None or before.num_rows == before.faiss_index.ntotal < index.num_rows
    assert index is not None and content(index) == content(built)
    assert IvfIndex.build(vectors[: NUM + 1], index) is index


# ---------------------------------------------------------------------- in a buffer


class Numbered:
    """The vector of "n" is row n."""

    name, dim = "numbered", DIM

    def __init__(self, vectors: Vectors) -> None:
        self.vectors = vectors

    def encode(self, texts: Sequence[str]) -> Vectors:
        return np.stack([self.vectors[int(text) if text.isdigit() else -1] for text in texts])


def traces(numbers: range) -> list[Trace]:
    return [
        Trace(str(number), "v", 1.0, "expert", f"task {number // 4}", number % 4, number % 4 == 3)
        for number in numbers
    ]


def test_a_large_buffer_is_searched_by_an_index(vectors: Vectors, tmp_path: Path) -> None:
    num, queries = 27_600, [str(number) for number in range(NUM, NUM + 60)]
    with TraceBuffer(tmp_path / "b", Numbered(vectors)) as buffer:
        buffer.add(traces(range(num)))
        assert buffer.stats().index == "ivf-sq8"
        found = buffer.search(queries, 3)
        filtered = buffer.search(queries, 3, exclude_tasks=[one[0][0].task_id for one in found])
        for one, without in zip(found, filtered, strict=True):
            assert not any(trace.terminal for trace, _ in [*one, *without])
            assert (
                one[0][0].task_id not in {trace.task_id for trace, _ in without}
                and len(without) == 3
            )
        eligible = np.arange(num) % 4 != 3
        exact = search_exactly(vectors[:num], vectors[NUM : NUM + 60], [eligible] * 60, 1)
        hits = sum(one[0][1] == best[0] for one, (_, best) in zip(found, exact, strict=True))
        assert hits >= 58
        buffer.add(traces(range(num, num + 3000)), update=1)
        last = str(num + 2998)
        assert buffer.search([last])[0][0][0].key == last
        grown = buffer.search(queries, 3)
        buffer.roll_back(0)
        assert len(buffer) == num and buffer.search(queries, 3) == found
        buffer.add(traces(range(num, num + 3000)), update=1)
        assert buffer.search(queries, 3) == grown
    with TraceBuffer(tmp_path / "b", Numbered(vectors)) as buffer:
        assert buffer.search(queries, 3) == grown, "an index made anew finds the same"
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_an_index_is_made_only_where_more_are_eligible_than_are_searched_exactly(
    vectors: Vectors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def note(vectors: Vectors, before: IvfIndex | None = None) -> IvfIndex:
        made.append(len(vectors))
        return build(vectors, before)

    build = IvfIndex.build
    monkeypatch.setattr(IvfIndex, "build", note)
    with TraceBuffer(tmp_path / "b", Numbered(vectors)) as buffer:
        buffer.add(traces(range(FLAT_LIMIT)))
        assert buffer.stats().index == "flat"
        buffer.search(["5"], allow_terminal=True)
        buffer.add(traces(range(FLAT_LIMIT, FLAT_LIMIT + 100)))
        # A quarter of them are terminal.
        buffer.search(["5"])
        assert made == []
        assert buffer.search(["5"], allow_terminal=True)[0][0][0].key == "5"
        assert made == [FLAT_LIMIT + 100]


def test_searches_go_on_while_traces_are_added(vectors: Vectors, tmp_path: Path) -> None:
    start, step, num = 28_000, 1_000, 34_000
    with (
        TraceBuffer(tmp_path / "b", Numbered(vectors)) as buffer,
        ThreadPoolExecutor(2) as threads,
    ):
        buffer.add(traces(range(start)))
        under_way = []
        for first in range(start, num, step):
            keys = [str(number) for number in range(first - 40, first) if number % 4 != 3]
            under_way += [(keys, threads.submit(buffer.search, keys)) for _ in range(3)]
            buffer.add(traces(range(first, first + step)))
        for keys, found in under_way:
            assert [one[0][0].key for one in found.result()] == keys
