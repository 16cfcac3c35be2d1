"""Nearest vectors: exactly against a loop, by lists around centroids against exactly, and the file
that keeps the latter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treegraft.core.errors import DataError
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
from treegraft.traces.keeper import IndexKeeper
from treegraft.traces.rows import Added, Rows, RowTable

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


def rows_of(vectors: Vectors) -> Rows:
    num = len(vectors)
    table = RowTable(vectors.shape[1])
    hashes = [f"{number:032x}" for number in range(num)]
    table.append(
        Added(
            range(num),
            vectors,
            [True] * num,
            [False] * num,
            ["task"] * num,
            ["source"] * num,
            hashes,
        )
    )
    return table.rows


@pytest.fixture(scope="module")
def rows(vectors: Vectors) -> Rows:
    return rows_of(vectors[:NUM])


@pytest.fixture(scope="module")
def built(rows: Rows) -> IvfIndex:
    index = IvfIndex.build(rows.vectors, None, lambda: False)
    assert index is not None
    return index


# ---------------------------------------------------------------------- exactly


@settings(max_examples=60, deadline=None)
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


def test_what_is_found_does_not_depend_on_the_company(
    rows: Rows, vectors: Vectors, built: IvfIndex
) -> None:
    queries, base = vectors[NUM : NUM + 100], np.arange(NUM) % 3 > 0
    for index, k in ((None, 1), (None, 7), (built, 7)):
        together = search_rows(rows.vectors, index, queries, base, [base] * 100, k)
        for query, (places, similarities) in zip(queries[:20], together, strict=False):
            alone = search_rows(rows.vectors, index, query[None], base, [base], k)[0]
            assert (alone[0] == places).all() and (alone[1] == similarities).all()


def test_few_eligible_rows_are_searched_exactly(
    rows: Rows, vectors: Vectors, built: IvfIndex
) -> None:
    base = np.arange(NUM) % 1000 == 7
    queries = vectors[NUM : NUM + 20]
    exact = search_exactly(rows.vectors, queries, [base] * 20, 3)
    found = search_rows(rows.vectors, built, queries, base, [base] * 20, 3)
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


def test_the_index_finds_the_nearest_nearly_always(
    rows: Rows, vectors: Vectors, built: IvfIndex
) -> None:
    assert built.num_rows == num_indexed(NUM) < NUM
    queries, everything = vectors[NUM:], np.ones(NUM, bool)
    exact = search_exactly(rows.vectors, queries, [everything] * 200, 1)
    found = [built.search(rows.vectors, query, everything, 1) for query in queries]
    hits = sum(int(a[1][0] == b[1][0]) for a, b in zip(exact, found, strict=True))
    assert hits >= 195


def test_rows_behind_the_index_are_found(rows: Rows, built: IvfIndex) -> None:
    for row in (built.num_rows, NUM - 1):
        places, similarities = built.search(rows.vectors, rows.vectors[row], np.ones(NUM, bool), 1)
        assert (places[0], similarities[0]) == (row, 1.0)


def test_only_eligible_rows_are_found_and_as_many_as_wanted(
    rows: Rows, vectors: Vectors, built: IvfIndex
) -> None:
    draw = np.random.default_rng(1)
    for share in (0.5, 0.01, 0.0002):
        mask = draw.random(NUM) < share
        for query in vectors[NUM : NUM + 10]:
            places, similarities = built.search(rows.vectors, query, mask, 5)
            assert mask[places].all() and len(set(places)) == len(places) == min(
                5, np.count_nonzero(mask)
            )
            assert list(similarities) == sorted(similarities, reverse=True)
    assert len(built.search(rows.vectors, vectors[NUM], np.zeros(NUM, bool), 5)[0]) == 0


def test_every_way_of_growing_ends_in_the_same_index(
    rows: Rows, vectors: Vectors, built: IvfIndex
) -> None:
    index: IvfIndex | None = None
    for num in (20_500, 24_000, 40_100, NUM):
        index = IvfIndex.build(vectors[:num], index, lambda: False)
        assert index is not None and index.num_rows == num_indexed(num)
    assert index is not None and index.to_bytes().tobytes() == built.to_bytes().tobytes()
    again = IvfIndex.from_bytes(built.to_bytes(), built.num_fitted)
    everything = np.ones(NUM, bool)
    for query in vectors[NUM : NUM + 20]:
        assert (
            again.search(rows.vectors, query, everything, 9)[0]
            == built.search(rows.vectors, query, everything, 9)[0]
        ).all()


def test_building_stops_when_told(rows: Rows) -> None:
    answers: Iterator[bool] = iter([False, False, True, True, True])
    assert IvfIndex.build(rows.vectors, None, lambda: next(answers)) is None


# ---------------------------------------------------------------------- the keeper and its file


def settled(path: Path, rows: Rows) -> IndexKeeper:
    keeper = IndexKeeper(path, "encoder")
    keeper.load(rows)
    keeper.refresh(rows)
    keeper.settle()
    return keeper


def test_a_saved_index_is_taken_up_and_a_damaged_or_foreign_one_is_not(
    rows: Rows, vectors: Vectors, tmp_path: Path
) -> None:
    path = tmp_path / "i"
    settled(path, rows).stop()
    assert [file.name for file in tmp_path.iterdir()] == ["i"]

    def loads(some: Rows, encoder: str = "encoder") -> bool:
        keeper = IndexKeeper(path, encoder)
        keeper.load(some)
        return keeper.current is not None

    more = rows_of(vectors)
    assert loads(rows) and loads(more)
    assert not loads(rows_of(vectors[:30_000])) and not loads(rows, "another")
    others = RowTable(DIM)
    others.append(
        Added(
            range(NUM),
            vectors[:NUM],
            [True] * NUM,
            [False] * NUM,
            [""] * NUM,
            [""] * NUM,
            ["other"] * NUM,
        )
    )
    assert not loads(others.rows)
    whole = path.read_bytes()
    for damaged in (
        whole[:-1],
        whole[:-9] + b"x" + whole[-8:],
        b"",
        b"{}\n",
        b"\xff\xfe\n" + whole,
        b"x" * 9000,
    ):
        path.write_bytes(damaged)
        assert not loads(rows)
    # And is made again, the same.
    settled(path, rows).stop()
    assert path.read_bytes() == whole


def test_an_index_that_cannot_be_saved_is_used_and_told_of(rows: Rows, tmp_path: Path) -> None:
    keeper = IndexKeeper(tmp_path / "missing" / "i", "encoder")
    keeper.refresh(rows)
    with pytest.raises(DataError, match=r"missing.*Free memory or disk space"):
        keeper.settle()
    assert keeper.current is not None
    keeper.settle()
    keeper.stop()
    assert keeper.current is None


def test_few_rows_need_no_index(vectors: Vectors, tmp_path: Path) -> None:
    keeper = settled(tmp_path / "i", rows_of(vectors[:FLAT_LIMIT]))
    assert keeper.current is None and not list(tmp_path.iterdir())


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


def test_a_large_buffer_is_indexed_in_the_background(vectors: Vectors, tmp_path: Path) -> None:
    num, queries = 22_600, [str(number) for number in range(NUM, NUM + 60)]
    with TraceBuffer(tmp_path / "b", Numbered(vectors)) as buffer:
        buffer.add(traces(range(num)))
        buffer.settle()
        assert buffer.stats().index == "ivf-sq8" and (tmp_path / "b.index").exists()
        found = buffer.search(queries, 3)
        filtered = buffer.search(queries, 3, exclude_tasks=[one[0][0].task_id for one in found])
        for one, without in zip(found, filtered, strict=True):
            assert not any(trace.terminal for trace, _ in [*one, *without])
            assert (
                one[0][0].task_id not in {trace.task_id for trace, _ in without}
                and len(without) == 3
            )
        buffer.add(traces(range(num, num + 3000)), update=1)
        # At once, before the index holds them: a row is its own nearest.
        last = str(num + 2998)
        assert buffer.search([last])[0][0][0].key == last
        buffer.settle()
        assert buffer.search([last])[0][0][0].key == last
        buffer.roll_back(0)
        buffer.settle()
        assert len(buffer) == num and buffer.search(queries, 3) == found
        buffer.copy_to(tmp_path / "copy")
    with TraceBuffer(tmp_path / "copy", Numbered(vectors)) as buffer:
        assert buffer.stats().index == "ivf-sq8" and buffer.search(queries, 3) == found


def test_closing_while_the_index_is_built_is_safe(vectors: Vectors, tmp_path: Path) -> None:
    with TraceBuffer(tmp_path / "b", Numbered(vectors)) as buffer:
        buffer.add(traces(range(FLAT_LIMIT + 100)))
    with TraceBuffer(tmp_path / "b", Numbered(vectors)) as buffer:
        assert buffer.search(["5"])[0][0][0].key == "5"
        buffer.settle()
        assert buffer.stats().index == "ivf-sq8"
