"""Dense search over HTTP: `treegraft serve search`'s server against one that answers one query at a time from a flat FAISS index.

OMP_NUM_THREADS=1 python benchmarks/search.py [--num 1000000] [--texts 20000] [--queries 256] [--encoder minilm] [--folder FOLDER]

Texts are generated, embedded once and each perturbed --num / --texts times (cosine about .98 with its original); the corpus's rows
are copies of the texts. Queries are generated texts of their own. Both servers run in this process on loopback, embed with the same
encoder, and read the passages they find from the same file; 32 clients ask one query each at a time, and both servers get the same
queries. The other server holds a lock while it embeds one query and scans all vectors (float32, inner product), as the retrieval
servers in use do. Its answers say how often ours finds the very nearest.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import random
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import uvicorn

from treegraft.bench.measure import compare
from treegraft.tools.corpus import Corpus, Passage, read_rows
from treegraft.tools.dense import DenseIndex, save_lists
from treegraft.tools.search import CorpusSearch, SearchBackend
from treegraft.tools.serve import listen, search_app, url_of
from treegraft.traces.embed import CACHE_SIZE, Encoder, build_encoder
from treegraft.traces.index import FLAT_LIMIT

Vectors = npt.NDArray[np.float32]

SEED, NUM_CLIENTS, TOP_K = 0, 32, 3
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
FACTS = ("was first described", "lies", "was rebuilt", "became famous", "was lost", "is studied", "was painted", "was opened")
PLACES = ("Norway", "Chile", "Ghana", "Japan", "Wales", "Iran", "Peru", "Crete", "Quebec", "Nepal", "Malta", "Texas")


class Uncached:
    """An encoder that forgets, so that asking twice costs twice."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder, self.name, self.dim = encoder, encoder.name, encoder.dim

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Returns [texts, dim] of unit length."""
        getattr(self._encoder, "_cache", {}).clear()
        return self._encoder.encode(texts)


class OneAtATime:
    """The other server's search: a flat index, one query after another."""

    def __init__(self, corpus: Corpus, vectors: Vectors, encoder: Encoder) -> None:
        import faiss

        self._corpus, self._encoder, self._lock = corpus, encoder, threading.Lock()
        self._index = faiss.IndexFlatIP(vectors.shape[1])
        self._index.add(vectors)

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
                found.append(self._corpus.read([int(row) for row in rows[0]], [float(score) for score in scores[0]]))
        return found


def texts(num: int, seed: int) -> Iterator[str]:
    """Gives generated passages of about forty words."""
    draw = random.Random(seed)
    for _ in range(num):
        topic = draw.choice(TOPICS)
        sentences = [
            f"In {draw.randrange(1100, 2020)} {topic} {draw.choice(FACTS)} in {draw.choice(PLACES)}, {draw.randrange(900)} km from "
            f"{draw.choice(PLACES)}."
            for _ in range(3)
        ]
        yield f'"{topic.title()} of {draw.choice(PLACES)}"\n' + " ".join(sentences)


def embedded(num: int, encoder: Encoder, path: Path) -> Vectors:
    """Returns [num, dim], embedded once."""
    if path.exists() and len(found := np.load(path)) == num:
        return found
    passages = list(texts(num, SEED))
    vectors = np.concatenate([encoder.encode(passages[first : first + 512]) for first in range(0, num, 512)])
    np.save(path, vectors)
    return vectors


def make_index(folder: Path, real: Vectors, passages: list[str], num: int) -> tuple[Path, Vectors]:
    """Writes corpus, vectors and lists; returns the corpus's path and [num, dim] vectors as the other server holds them."""
    draw = np.random.default_rng(SEED)
    vectors = np.resize(real, (num, real.shape[1]))
    vectors += 0.2 / np.sqrt(real.shape[1]) * draw.standard_normal(vectors.shape, dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    corpus = folder / "corpus.jsonl"
    with corpus.open("w", encoding="utf-8") as file:
        for row in range(num):
            file.write(json.dumps({"id": str(row), "contents": passages[row % len(passages)]}) + "\n")
    halves = vectors.astype(np.float16)
    halves.tofile(folder / "vectors.f16")
    np.save(folder / "offsets.npy", np.array([row.offset for row in read_rows(corpus)], np.uint64))
    if num > FLAT_LIMIT:
        save_lists(halves, folder)
    return corpus, vectors


@contextmanager
def served(backend: SearchBackend) -> Iterator[str]:
    """Serves a search on loopback; gives its address."""
    listener = listen("127.0.0.1", 0)
    app = search_app(backend, default_top_k=TOP_K, hosts=["*"])
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield url_of(listener)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def ask_all(url: str, queries: list[str]) -> list[list[Any]]:
    """Returns what the server found for each query, asked by NUM_CLIENTS clients, one query a request."""

    async def work() -> list[list[Any]]:
        waiting, found = list(enumerate(queries)), [[] for _ in queries]

        async def client(connection: httpx.AsyncClient) -> None:
            while waiting:
                place, query = waiting.pop()
                asked = {"queries": [query], "topk": TOP_K, "return_scores": True}
                found[place] = (await connection.post(url, json=asked)).raise_for_status().json()["result"][0]

        async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=NUM_CLIENTS), trust_env=False) as connection:
            await asyncio.gather(*(client(connection) for _ in range(NUM_CLIENTS)))
        return found

    return asyncio.run(work())


def main() -> None:
    """Prints the ratio, queries per second of both, and how often ours finds the nearest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=100_000, help="vectors")
    parser.add_argument("--texts", type=int, default=2_000, help="embedded passages")
    parser.add_argument("--queries", type=int, default=128, help="at most 16,384")
    parser.add_argument("--encoder", default="minilm")
    parser.add_argument("--folder", type=Path, default=None, help="keeps embedded passages for the next run")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    assert options.queries <= CACHE_SIZE
    encoder = Uncached(build_encoder(options.encoder, keeps="beginning"))
    threads = os.environ.get("OMP_NUM_THREADS", "unset")
    print(f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, OMP_NUM_THREADS {threads}, seed {SEED}")
    print(f"{options.num:,} vectors from {options.texts:,} passages, {options.queries} queries, encoder {encoder.name}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        kept = (options.folder or folder) / f"passages-{encoder.name}.npy"
        began = time.perf_counter()
        real = embedded(options.texts, encoder, kept)
        print(f"embedding: {len(real) / (time.perf_counter() - began):,.0f} passages/s (from {kept.name} where it was there)")
        began = time.perf_counter()
        path, vectors = make_index(folder, real, list(texts(options.texts, SEED)), options.num)
        print(f"corpus, vectors and lists: {time.perf_counter() - began:.1f} s", flush=True)
        index = DenseIndex(folder, encoder)
        queries = list(texts(options.queries, SEED + 1))
        ours = CorpusSearch(Corpus(path, index.offsets), index)
        theirs = OneAtATime(Corpus(path, index.offsets), vectors, encoder)
        with served(ours) as our_url, served(theirs) as their_url:
            began = time.perf_counter()
            exact = ask_all(their_url, queries)
            print(f"the other server: {len(queries) / (time.perf_counter() - began):,.1f} queries/s")
            began = time.perf_counter()
            found = ask_all(our_url, queries)
            print(f"ours: {len(queries) / (time.perf_counter() - began):,.1f} queries/s")
            hits = [a[0]["score"] >= b[0]["score"] - 1e-3 for a, b in zip(found, exact, strict=True)]
            print(f"recall@1: {np.mean(hits):.3f}", flush=True)
            compare(
                "dense search over HTTP",
                lambda: ask_all(our_url, queries),
                lambda: ask_all(their_url, queries),
                "one query at a time over a flat index",
                options.runs,
            )


if __name__ == "__main__":
    main()
