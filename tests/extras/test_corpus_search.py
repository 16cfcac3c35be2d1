"""Search over a corpus: rows by their place, BM25 against its formula, dense against sorting,
indexes that survive kills and changes."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.error_codes import raises_code

from treegraft.core.errors import DataError
from treegraft.core.types import Task
from treegraft.extras.search import dense, lexical, local
from treegraft.extras.search import home as index_home
from treegraft.extras.search.corpus import Corpus, read_rows
from treegraft.extras.search.dense import DenseIndex
from treegraft.extras.search.home import find_or_make
from treegraft.extras.search.lexical import LexicalIndex
from treegraft.extras.search.local import CorpusSearch, open_corpus
from treegraft.tools.search.encoders import HashingEncoder
from treegraft.tools.search.tool import SearchTool

TASK = Task(id="t", question="?", reference=())
NAMES = (
    "Ash",
    "Birch",
    "Cedar",
    "Elm",
    "Fir",
    "Hazel",
    "Larch",
    "Maple",
    "Oak",
    "Pine",
    "Rowan",
    "Willow",
)


def sentence(draw: random.Random, num_words: int = 12) -> str:
    return " ".join(f"{draw.choice(NAMES).lower()}{draw.randrange(40)}" for _ in range(num_words))


def write(path: Path, texts: Sequence[str]) -> Path:
    """Rows in the wiki-18 dump's form: a title in quotes, a line break, the text."""
    rows = [
        json.dumps({"id": str(n), "contents": f'"{NAMES[n % 12]}"\n{text}'})
        for n, text in enumerate(texts)
    ]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


# ---------------------------------------------------------------------- rows


def test_rows_are_read_by_their_place(tmp_path: Path) -> None:
    lines = [
        b'\xef\xbb\xbf{"id": 7, "contents": "one"}',
        b"",
        b' {"contents": "zw\xc3\xb6lf", "id": "b"} \r',
        b'{"id":"c","contents":""}',
    ]
    path = tmp_path / "c.jsonl"
    path.write_bytes(b"\n".join(lines))
    rows = list(read_rows(path))
    assert [(row.offset, row.id, row.contents) for row in rows] == [
        (0, 7, "one"),
        (33, "b", "zwölf"),
        (70, "c", ""),
    ]
    corpus = Corpus(path, np.array([row.offset for row in rows], np.uint64))
    assert [(p.id, p.contents, p.score) for p in corpus.read([2, 0, 1], [3.0, 2.0, 1.0])] == [
        ("c", "", 3.0),
        (7, "one", 2.0),
        ("b", "zwölf", 1.0),
    ]
    with path.open("ab") as file:
        file.write(b'\n{"id": "d", "contents": "x"}')
    with raises_code("corpus-changed", match="was changed while it was in use"):
        corpus.read([0], [1.0])
    corpus.close()
    corpus.close()


# ---------------------------------------------------------------------- by words


def words_of(text: str) -> list[str]:
    """Words as the index takes them, where "the" is the only stop word."""
    return [word for word in re.findall(r"\w+", text.lower()) if word != "the"]


def by_the_formula(texts: list[list[str]], query: list[str]) -> np.ndarray:
    """BM25 as the head of `lexical` writes it, one passage after the other."""
    num = len(texts)
    mean = np.mean([len(text) for text in texts])
    scores = np.zeros(num)
    for word in query:
        found = sum(word in text for text in texts)
        for row, text in enumerate(texts):
            damping = lexical.K1 * (1 - lexical.B + lexical.B * len(text) / mean)
            weight = math.log(1 + (num - found + 0.5) / (found + 0.5))
            scores[row] += weight * text.count(word) / (text.count(word) + damping)
    return scores


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 60), st.integers(0, 2**32 - 1))
def test_scores_follow_the_formula(
    tmp_path_factory: pytest.TempPathFactory, num: int, seed: int
) -> None:
    draw = random.Random(seed)
    texts = [
        " ".join(
            draw.choice(["oak", "elm", "the", "fir", "ash", "Oak,", "ÄSCHE", "松", "42"])
            for _ in range(draw.randrange(9))
        )
        for _ in range(num)
    ]
    folder = tmp_path_factory.mktemp("bm25")
    path = write(folder / "c.jsonl", texts)
    words = [words_of(row.contents) for row in read_rows(path)]
    built = LexicalIndex.build(read_rows(path), path)
    built.save(folder)
    for index in (built, LexicalIndex.load(folder)):
        for query in ("oak", "elm fir oak oak", "äsche 松", "zebra", "the", ""):
            expected = by_the_formula(words, words_of(query))
            ((rows, scores),) = index.search([query], num)
            assert sorted(rows) == list(np.flatnonzero(expected))
            assert scores == pytest.approx(expected[rows], rel=1e-5)
            # Best first, and the earlier row where two are equal.
            assert list(rows) == sorted(
                rows, key=lambda row: (-dict(zip(rows, scores, strict=True))[row], row)
            )
            ((first, _),) = index.search([query], 5)
            assert list(first) == list(rows[:5])
        index.close()


def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    """20 MB of text: what Python and numpy hold at the peak stays below 10 MB, and far below it
    while searching."""
    path = tmp_path / "large.jsonl"
    draw = random.Random(0)
    filler = sentence(draw, 50) + " -" * 10_000
    with path.open("w") as file:
        for number in range(900):
            file.write(json.dumps({"id": number, "contents": f'"needle{number}"\n{filler}'}) + "\n")
    assert path.stat().st_size > 17_000_000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("treegraft.extras.search.local.SMALL_BYTES", 0)
        tracemalloc.start()
        search = open_corpus(str(path))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        ((found,),) = asyncio.run(search.search(["needle789"], 3))
        _, after = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert (found.id, found.contents[:11]) == (789, '"needle789"')
    assert peak < 10_000_000
    assert after - before < 1_000_000
    assert len([*(tmp_path / "large.jsonl.bm25").glob("*/index.json")]) == 1
    asyncio.run(search.close())


def test_a_large_corpus_is_indexed_once_and_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treegraft.extras.search.local.SMALL_BYTES", 0)
    path = write(tmp_path / "c.jsonl", ["oak", "elm"])

    def ids(query: str) -> list[str | int]:
        search = open_corpus(str(path))
        (found,) = asyncio.run(search.search([query], 3))
        asyncio.run(search.close())
        return [passage.id for passage in found]

    assert ids("elm") == ["1"]
    with monkeypatch.context() as patch:
        patch.setattr(LexicalIndex, "build", None)
        assert ids("oak") == ["0"]
    write(path, ["fir", "oak"])
    assert ids("oak") == ["1"] and ids("elm") == []


# ---------------------------------------------------------------------- by meaning


class Counting(HashingEncoder):
    """Counts what it embeds."""

    num_texts = 0

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        self.num_texts += len(texts)
        return super().encode(texts)


def test_the_nearest_passages_are_found_exactly(tmp_path: Path) -> None:
    draw = random.Random(1)
    texts = [sentence(draw) for _ in range(300)]
    path = write(tmp_path / "c.jsonl", texts)
    search = open_corpus(str(path), "dense", encoder="hashing")
    encoder = HashingEncoder()
    contents = [row.contents for row in read_rows(path)]
    stored = encoder.encode(contents).astype(np.float16).astype(np.float64)
    queries = [contents[17], sentence(draw), "Oak"]
    found = asyncio.run(search.search(queries, 4))
    for query, passages in zip(queries, found, strict=True):
        cosines = (stored @ encoder.encode([query])[0].astype(np.float64)).clip(-1, 1).round(6)
        expected = sorted(range(300), key=lambda row: (-cosines[row], row))[:4]
        assert [passage.id for passage in passages] == [str(row) for row in expected]
        assert [passage.score for passage in passages] == pytest.approx(
            [cosines[row] for row in expected], abs=2e-6
        )
        assert [passage.contents for passage in passages] == [contents[row] for row in expected]
    assert found[0][0].id == "17" and found[0][0].score == pytest.approx(1.0, abs=1e-3)
    asyncio.run(search.close())


def clustered(num: int, dim: int) -> np.ndarray:
    draw = np.random.default_rng(0)
    centres = draw.normal(size=(200, dim))
    vectors = centres[draw.integers(0, 200, num)] + 0.5 * draw.normal(size=(num, dim))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float16)


class Given:
    """Stands in for a model of 16 dimensions: a text is the number of its vector."""

    name = "given"
    dim = 16

    def __init__(self, vectors: np.ndarray) -> None:
        self.vectors = vectors

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        return self.vectors[[int(text) for text in texts]].astype(np.float32)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DenseIndex, np.ndarray]]:
    """21,500 vectors in lists, and the folder moved."""
    folder = tmp_path_factory.mktemp("large")
    vectors = clustered(21_500, 16)
    vectors.tofile(folder / "vectors.f16")
    np.save(folder / "offsets.npy", np.arange(len(vectors), dtype=np.uint64))
    dense.save_lists(vectors, folder / "lists.faiss")
    assert [path.name for path in folder.glob("lists*")] == ["lists.faiss"]
    index = DenseIndex(folder.rename(folder.with_name("moved")), Given(vectors), num_threads=2)
    yield index, vectors
    index.close()


def test_lists_on_disk_find_what_sorting_finds(large: tuple[DenseIndex, np.ndarray]) -> None:
    index, vectors = large
    rows = list(range(0, 21_500, 215))
    found = index.search([str(row) for row in rows], 5)
    hits = 0
    for row, (places, scores) in zip(rows, found, strict=True):
        cosines = vectors.astype(np.float64) @ vectors[row].astype(np.float64)
        expected = np.lexsort((np.arange(len(vectors)), -cosines.clip(-1, 1).round(6)))[:5]
        hits += len(set(expected) & set(places))
        assert (
            list(scores) == pytest.approx(cosines[places].clip(-1, 1), abs=2e-6)
            and len(places) == 5
        )
    assert hits >= 0.9 * 5 * len(rows)


def test_what_is_found_does_not_depend_on_the_company(large: tuple[DenseIndex, np.ndarray]) -> None:
    index, _ = large
    queries = [str(row) for row in range(0, 21_500, 500)]
    together = index.search(queries, 3)
    for query, (rows, scores) in zip(queries, together, strict=True):
        ((alone, alone_scores),) = index.search([query], 3)
        assert list(rows) == list(alone) and list(scores) == list(alone_scores)


# ---------------------------------------------------------------------- built once, and again


def build(path: Path, encoder: Counting) -> DenseIndex:
    home = index_home.index_home(path, "dense", "")
    folder = find_or_make(
        path,
        home,
        {"encoder": "hashing"},
        lambda made: DenseIndex.build(read_rows(path), made, encoder),
    )
    return DenseIndex(folder, encoder, num_threads=1)


def test_an_index_is_made_once_and_again_for_another_corpus(tmp_path: Path) -> None:
    draw = random.Random(2)
    encoder = Counting()
    path = write(tmp_path / "c.jsonl", [sentence(draw) for _ in range(50)])
    old = build(path, encoder)
    assert encoder.num_texts == 50
    build(path, encoder).close()
    os.utime(path, ns=(1, 1))  # another time, the same contents
    build(path, encoder).close()
    assert encoder.num_texts == 50
    home = tmp_path / "c.jsonl.dense"
    (record,) = home.glob("*/index.json")
    record.unlink()  # unfinished: the vectors are still there
    build(path, encoder).close()
    assert encoder.num_texts == 50
    write(path, [sentence(draw) for _ in range(50)])  # as many bytes, nearly
    build(path, encoder).close()
    assert encoder.num_texts == 100
    # Who had the old one open keeps it.
    assert len(old.search(["x"], 3)[0][0]) == 3
    old.close()


def test_a_build_does_not_write_through_links(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", ["oak"])
    encoder = Counting()
    own = tmp_path / "own.txt"
    own.write_text("kept")
    build(path, encoder).close()
    (record,) = (tmp_path / "c.jsonl.dense").glob("*/index.json")
    record.unlink()
    for name in ("vectors.f16", "offsets.npy"):
        (record.parent / name).unlink()
        (record.parent / name).symlink_to(own)
    build(path, encoder).close()
    assert own.read_text() == "kept" and encoder.num_texts == 2


def test_an_index_is_made_again_for_other_weights_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "c.jsonl", ["oak", "fir"])
    encoder = Counting()
    weights = tmp_path / "encoder" / "model.safetensors"
    encoder.name = str(weights.parent)
    weights.parent.mkdir()
    monkeypatch.setattr(local, "build_encoder", lambda *_, **__: encoder)
    found = []
    for content in ("1", "1", "2"):
        weights.write_text(content)
        search = open_corpus(str(path), "dense", encoder="./encoder")
        asyncio.run(search.close())
        found.append((search.fingerprint, encoder.num_texts))
    assert found[0] == found[1] and [num for _, num in found] == [2, 2, 4]
    assert found[1][0] != found[2][0]


KILLED = """
import sys
from pathlib import Path
from treegraft.extras.search import dense, home
from treegraft.extras.search.corpus import read_rows
from treegraft.tools.search.encoders import HashingEncoder
class Slow(HashingEncoder):
    def encode(self, texts):
        import time
        print("block", flush=True)
        time.sleep(0.2)
        return super().encode(texts)
dense.BLOCK = 8
path = Path(sys.argv[1])
home.find_or_make(path, home.index_home(path, "dense", ""), {"encoder": "hashing"},
                        lambda made: dense.DenseIndex.build(read_rows(path), made, Slow()))
"""


def test_a_build_that_is_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    draw = random.Random(3)
    encoder = Counting()
    path = write(tmp_path / "c.jsonl", [sentence(draw) for _ in range(80)])
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    for _ in range(4):
        assert child.stdout.readline() == "block\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    home = tmp_path / "c.jsonl.dense"
    (folder,) = (one for one in home.iterdir() if one.is_dir())
    # A block that was cut off in the middle is made again.
    with (folder / "vectors.f16").open("ab") as file:
        file.write(b"half")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense, "BLOCK", 8)
        index = build(path, encoder)
    assert 80 - 32 <= encoder.num_texts <= 80 - 16
    contents = [row.contents for row in read_rows(path)]
    assert (index._vectors == HashingEncoder().encode(contents).astype(np.float16)).all()
    index.close()


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", ["oak"])
    (tmp_path / "c.jsonl.dense").write_text("in the way")
    for index_dir in ("", str(path)):
        with raises_code("index-unwritable", match=r"tools\.search\.index_dir"):
            index_home.index_home(path, "dense", index_dir)
    assert index_home.index_home(path, "dense", str(tmp_path / "other")).is_dir()


# ---------------------------------------------------------------------- asked together


class Slowly:
    """An index that takes its time and remembers what it was asked with what."""

    offsets = np.zeros(1, np.uint64)

    def __init__(self) -> None:
        self.asked: list[tuple[list[str], int]] = []

    def search(self, queries: Sequence[str], top_k: int) -> list[tuple[np.ndarray, np.ndarray]]:
        self.asked.append((list(queries), top_k))
        time.sleep(0.05)
        if "bad" in queries:
            raise DataError("broken")
        return [(np.zeros(1, np.int64), np.full(1, float(query))) for query in queries]

    def close(self) -> None:
        pass


def test_what_is_asked_meanwhile_is_answered_together(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", ["oak"])
    index = Slowly()
    search = CorpusSearch(Corpus(path, index.offsets), index, "bm25")

    async def work() -> None:
        first = asyncio.create_task(search.search(["0"], 1))
        await asyncio.sleep(0.01)
        rest = [
            asyncio.create_task(search.search([str(n), str(-n)], 1 + n % 2)) for n in range(1, 7)
        ]
        found = await asyncio.gather(first, *rest)
        assert [[p.score for (p,) in answer] for answer in found] == [
            [0.0],
            *([n, -n] for n in range(1, 7)),
        ]
        assert len(index.asked) == 3 and {top_k for _, top_k in index.asked[1:]} == {1, 2}
        for outcome in await asyncio.gather(
            search.search(["bad"], 1), search.search(["bad"], 2), return_exceptions=True
        ):
            assert isinstance(outcome, DataError)
        assert (await search.search(["5"], 1))[0][0].score == 5.0

    asyncio.run(work())

    async def give_up() -> None:
        task = asyncio.create_task(search.search(["1"], 1))
        await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(give_up())
    # Another event loop, after one that was left in the middle.
    assert asyncio.run(search.search(["2"], 1))[0][0].score == 2.0
    asyncio.run(search.close())


def test_the_tool_shows_title_and_text_on_one_line(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", ["oak and elm", "fir"])
    tool = SearchTool(open_corpus(str(path), "dense", encoder="hashing"), top_k=1)
    assert asyncio.run(tool('"Ash"\noak and elm', TASK)) == 'Doc 1: "Ash" oak and elm'
    asyncio.run(tool.close())


def test_an_unknown_encoder_or_a_bad_row_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", ["oak"])
    with raises_code("unknown-encoder"):
        open_corpus(str(path), "dense", encoder="minilmm")
    path.write_text('{"id": 1}\n')
    with raises_code("corpus-key-missing"):
        open_corpus(str(path), "dense", encoder="hashing")


@pytest.mark.slow
def test_minilm_finds_by_meaning(tmp_path: Path) -> None:
    texts = ["The cat sleeps on the sofa.", "Stock prices fell sharply.", "A recipe for apple pie."]
    path = write(tmp_path / "c.jsonl", texts)
    search = open_corpus(str(path), "dense")
    found = asyncio.run(
        search.search(["a pet is napping", "the market crashed", "how to bake a dessert"], 1)
    )
    assert [passages[0].id for passages in found] == ["0", "1", "2"]
    asyncio.run(search.close())
