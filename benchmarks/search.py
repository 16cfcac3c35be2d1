"""Dense search over HTTP: `treegraft serve search`'s server against one that answers one query at a
time from a flat FAISS index.

OMP_NUM_THREADS=1 python -m benchmarks.search [--num 1000000] [--texts 20000] [--queries 256]
[--encoder minilm] [--folder FOLDER]

Texts are generated, embedded once and each perturbed --num / --texts times (cosine about .98 with
its original); the corpus's rows are copies of the texts. Queries are generated texts of their own.
Both servers run in this process on loopback, embed with the same encoder, and read the passages
they find from the same file; 32 clients ask one query each at a time, and both servers get the same
queries. The other server holds a lock while it embeds one query and scans all vectors (float32,
inner product), as the retrieval servers in use do. Its answers say how often ours finds the very
nearest.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import random
import resource
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import uvicorn

from benchmarks.speed.measure import compare
from treegraft.core.interfaces import Passage, SearchBackend
from treegraft.core.listener import address_of, listen
from treegraft.extras.search.corpus import Corpus, read_rows
from treegraft.extras.search.dense import FLAT_LIMIT, DenseIndex, save_lists
from treegraft.extras.search.local import CorpusSearch
from treegraft.extras.search.serve import search_app
from treegraft.tools.search.encoders import CACHE_SIZE, Encoder, build_encoder

Vectors = npt.NDArray[np.float32]

SEED = 0
NUM_CLIENTS = 32
TOP_K = 3
PART = 512
BLOCK = 16_384
"""Passages embedded, and vectors perturbed, at a time."""
TOPICS = (
    "a river",
    "a king",
    "a comet",
    "a harbour",
    "an orchestra",
    "a vaccine",
    "a bridge",
    "a chess player",
    "a volcano",
    "a law",
)
FACTS = (
    "was first described",
    "lies",
    "was rebuilt",
    "became famous",
    "was lost",
    "is studied",
    "was painted",
    "was opened",
)
PLACES = (
    "Norway",
    "Chile",
    "Ghana",
    "Japan",
    "Wales",
    "Iran",
    "Peru",
    "Crete",
    "Quebec",
    "Nepal",
    "Malta",
    "Texas",
)


class Uncached:
    """An encoder that forgets, so that asking twice costs twice."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self.name = encoder.name
        self.dim = encoder.dim

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Returns [texts, dim] of unit length."""
        getattr(self._encoder, "_cache", {}).clear()
        return self._encoder.encode(texts)


class OneAtATime:
    """The other server's search: a flat index, one query after another."""

    is_remote = False
    fingerprint = ""

    def __init__(self, corpus: Corpus, blocks: Iterable[Vectors], encoder: Encoder) -> None:
        import faiss

        self._corpus = corpus
        self._encoder = encoder
        self._lock = threading.Lock()
        self._index = faiss.IndexFlatIP(encoder.dim)
        for block in blocks:
            self._index.add(block)

    async def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """Returns for each query its best passages."""
        return await asyncio.to_thread(self._search, queries, top_k)

    async def close(self) -> None:
        """Nothing to release."""

    def _search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        found = []
        with self._lock:
            for query in queries:
                scores, rows = self._index.search(self._encoder.encode([query]), top_k)
                found.append(
                    self._corpus.read(
                        [int(row) for row in rows[0]], [float(score) for score in scores[0]]
                    )
                )
        return found


def texts(num: int, seed: int) -> Iterator[str]:
    """Gives generated passages of about forty words."""
    draw = random.Random(seed)
    for _ in range(num):
        topic = draw.choice(TOPICS)
        sentences = [
            f"In {draw.randrange(1100, 2020)} {topic} {draw.choice(FACTS)} in"
            f" {draw.choice(PLACES)}, {draw.randrange(900)} km from {draw.choice(PLACES)}."
            for _ in range(3)
        ]
        yield f'"{topic.title()} of {draw.choice(PLACES)}"\n' + " ".join(sentences)


def embedded(num: int, encoder: Encoder, folder: Path) -> Vectors:
    """Returns [num, dim], embedded once; what is done lies in the folder part by part, so that a
    stopped run goes on."""
    passages = list(texts(num, SEED))
    parts = []
    for first in range(0, num, PART):
        path = folder / f"passages-{encoder.name}-{first}-{min(first + PART, num)}.npy"
        if not path.exists():
            partial = path.with_suffix(".partial")
            with partial.open("wb") as file:
                np.save(file, encoder.encode(passages[first : first + PART]))
            partial.replace(path)
        parts.append(np.load(path))
    return np.concatenate(parts)


def perturbed(real: Vectors, num: int) -> Iterator[Vectors]:
    """Gives blocks of `num` unit vectors in all: the real ones over and over, each time with other
    noise."""
    for number, first in enumerate(range(0, num, BLOCK)):
        draw = np.random.default_rng((SEED, number))
        block = real[np.arange(first, min(first + BLOCK, num)) % len(real)]
        block = block + 0.2 / np.sqrt(real.shape[1]) * draw.standard_normal(
            block.shape, dtype=np.float32
        )
        yield block / np.linalg.norm(block, axis=1, keepdims=True)


def make_index(folder: Path, real: Vectors, passages: list[str], num: int) -> Path:
    """Writes corpus, vectors and lists where they are not there yet; returns the corpus's path.

    Memory holds one block, and the lists while they are made.
    """
    corpus = folder / "corpus.jsonl"
    done = folder / "done"
    if done.exists():
        return corpus
    folder.mkdir(parents=True, exist_ok=True)
    with corpus.open("w", encoding="utf-8") as file:
        for row in range(num):
            file.write(
                json.dumps({"id": str(row), "contents": passages[row % len(passages)]}) + "\n"
            )
    with (folder / "vectors.f16").open("wb") as file:
        for block in perturbed(real, num):
            block.astype(np.float16).tofile(file)
    np.save(
        folder / "offsets.npy",
        np.fromiter((row.offset for row in read_rows(corpus)), np.uint64, num),
    )
    if num > FLAT_LIMIT:
        stored = np.memmap(folder / "vectors.f16", np.float16, "r", shape=(num, real.shape[1]))
        save_lists(stored, folder / "lists.faiss")
    done.touch()
    return corpus


@contextmanager
def served(backend: SearchBackend) -> Iterator[str]:
    """Serves a search on loopback; gives its address."""
    listener = listen("127.0.0.1", 0)
    app = search_app(backend, default_top_k=TOP_K, host="127.0.0.1")
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"{address_of(listener)}retrieve"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def ask_all(url: str, queries: list[str]) -> list[list[Any]]:
    """Returns what the server found for each query, asked by NUM_CLIENTS clients, one query a
    request."""

    async def work() -> list[list[Any]]:
        waiting = list(enumerate(queries))
        found: list[list[Any]] = [[] for _ in queries]

        async def client(connection: httpx.AsyncClient) -> None:
            while waiting:
                place, query = waiting.pop()
                asked = {"queries": [query], "topk": TOP_K, "return_scores": True}
                found[place] = (
                    (await connection.post(url, json=asked)).raise_for_status().json()["result"][0]
                )

        async with httpx.AsyncClient(
            timeout=600, limits=httpx.Limits(max_connections=NUM_CLIENTS), trust_env=False
        ) as connection:
            await asyncio.gather(*(client(connection) for _ in range(NUM_CLIENTS)))
        return found

    return asyncio.run(work())


def peak_gb() -> float:
    """Returns the largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    """Prints the ratio, queries per second of both, and how often ours finds the nearest."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num", type=int, default=100_000, help="vectors")
    parser.add_argument("--texts", type=int, default=2_000, help="embedded passages")
    parser.add_argument("--queries", type=int, default=128, help="at most 16,384")
    parser.add_argument("--encoder", default="minilm")
    parser.add_argument(
        "--folder",
        type=Path,
        default=None,
        help="keeps embedded passages and the index for the next run",
    )
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    assert options.queries <= CACHE_SIZE
    encoder = Uncached(build_encoder(options.encoder, keeps="beginning"))
    threads = os.environ.get("OMP_NUM_THREADS", "unset")
    print(
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, OMP_NUM_THREADS"
        f" {threads}, seed {SEED}"
    )
    print(
        f"{options.num:,} vectors from {options.texts:,} passages, {options.queries} queries,"
        f" encoder {encoder.name}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as temporary:
        kept = options.folder or Path(temporary)
        kept.mkdir(parents=True, exist_ok=True)
        folder = kept / f"index-{encoder.name}-{options.num}-{options.texts}"
        began = time.perf_counter()
        real = embedded(options.texts, encoder, kept)
        print(
            f"embedding: {time.perf_counter() - began:.1f} s (parts that were there are taken)",
            flush=True,
        )
        began = time.perf_counter()
        path = make_index(folder, real, list(texts(options.texts, SEED)), options.num)
        print(
            f"corpus, vectors and lists: {time.perf_counter() - began:.1f} s, peak memory"
            f" {peak_gb():.1f} GB so far",
            flush=True,
        )
        index = DenseIndex(folder, encoder)
        queries = list(texts(options.queries, SEED + 1))
        ours = CorpusSearch(Corpus(path, index.offsets), index, "dense")
        theirs = OneAtATime(Corpus(path, index.offsets), perturbed(real, options.num), encoder)
        with served(ours) as our_url, served(theirs) as their_url:
            began = time.perf_counter()
            exact = ask_all(their_url, queries)
            print(
                f"the other server: {len(queries) / (time.perf_counter() - began):,.1f} queries/s"
            )
            began = time.perf_counter()
            found = ask_all(our_url, queries)
            print(f"ours: {len(queries) / (time.perf_counter() - began):,.1f} queries/s")
            hits = [
                a[0]["score"] >= b[0]["score"] - 1e-3 for a, b in zip(found, exact, strict=True)
            ]
            print(f"recall@1: {np.mean(hits):.3f}", flush=True)
            print(
                f"peak memory: {peak_gb():.1f} GB, the other server's float32 vectors included",
                flush=True,
            )
            compare(
                "dense search over HTTP",
                lambda: ask_all(our_url, queries),
                lambda: ask_all(their_url, queries),
                "one query at a time over a flat index",
                options.runs,
            )


if __name__ == "__main__":
    main()
