"""The Step-Trace Buffer with 170,000 traces: adding, search, recall against exact search, opening.

OMP_NUM_THREADS=1 python benchmarks/buffer.py [DATA] [--vectors FILE.npy] [--folder FOLDER] [--hnsw]

Real keys are the questions of DATA (default $TREEGRAFT_DATA), and histories made of questions and recorded searches; MiniLM embeds
them once into FILE.npy. 20,000 of them are grown to 170,000 by small perturbations, the other 1,000 are the queries. Searches use
the default filter (no terminal traces) and read the traces they find from the file; embedding is not in their times. Kills during
`add` are a test: pytest -m slow tests/test_buffer.py
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from treegraft.traces import index as index_module
from treegraft.traces.buffer import TraceBuffer
from treegraft.traces.embed import build_encoder
from treegraft.traces.index import IvfIndex, search_exactly
from treegraft.traces.rows import Added, RowTable
from treegraft.types import Trace

Vectors = npt.NDArray[np.float32]

SEED = 0
NUM_REAL, NUM_QUERIES, NUM_TRACES = 20_000, 1_000, 170_000
BATCH = 64
RESULT_CHARACTERS = 300
"""Of a recorded search, in a key."""


def questions(data: Path) -> list[str]:
    """Returns every question of the folder once."""
    import pyarrow.parquet as parquet

    found: list[str] = []
    for path in sorted((data / "rl").glob("*.parquet")):
        found += [row["extra_info"]["question"] for row in parquet.read_table(path, columns=["extra_info"]).to_pylist()]
    for path in sorted((data / "benchmarks").glob("*.jsonl")):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        found += [row.get("question") or row["problem"] for row in rows]
    return list(dict.fromkeys(" ".join(question.split()) for question in found))


def histories(asked: list[str], data: Path, num: int) -> Iterator[str]:
    """Gives keys of a question, a recorded search that shares most words with it, and the beginning of the result."""
    recorded = json.loads((data / "rl" / "search_cache.json").read_text(encoding="utf-8"))
    words = [set(question.lower().split()) for question in asked]
    rounds = -(-num // len(recorded))
    made = 0
    for query, result in recorded.items():
        sought = set(query.lower().split())
        shares = [len(sought & some) / len(sought | some) for some in words]
        for place in sorted(range(len(asked)), key=lambda place: -shares[place])[:rounds]:
            if made < num:
                yield f"{asked[place]}\nsearch {query}\n{' '.join(result.split())[:RESULT_CHARACTERS]}"
                made += 1


def real_keys(data: Path) -> list[str]:
    """Returns NUM_REAL + NUM_QUERIES different keys in a random order."""
    asked = questions(data)
    keys = [*asked, *histories(asked, data, NUM_REAL + NUM_QUERIES - len(asked))]
    random.Random(SEED).shuffle(keys)
    return keys


def real_vectors(data: Path, path: Path) -> Vectors:
    """Returns [keys, 384], embedded once; a run that was cut off goes on where it stood."""
    if path.exists():
        return np.load(path)
    keys, encoder = real_keys(data), build_encoder("minilm")
    # Neighbours of like length share a forward pass.
    order = sorted(range(len(keys)), key=lambda place: len(keys[place]))
    partial = path.with_suffix(".partial.npy")
    done = list(np.load(partial)) if partial.exists() else []
    for first in range(len(done), len(keys), 512):
        done += list(encoder.encode([keys[place] for place in order[first : first + 512]]))
        np.save(partial, np.stack(done))
        print(f"{len(done)} of {len(keys)} keys embedded", flush=True)
    vectors = np.zeros((len(keys), encoder.dim), np.float32)
    vectors[order] = np.stack(done)
    np.save(path, vectors)
    partial.unlink(missing_ok=True)
    return vectors


# ---------------------------------------------------------------------- the buffer


class Given:
    """Stands in for MiniLM: the vector of "n\\n..." is row n."""

    name, dim = "minilm", 384

    def __init__(self, vectors: Vectors) -> None:
        self.vectors = vectors

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Returns the rows, for the buffer's own probe the first one."""
        numbers = [text.partition("\n")[0] for text in texts]
        return self.vectors[[int(number) if number.isdigit() else 0 for number in numbers]]


def grown(real: Vectors, num: int) -> Vectors:
    """Returns [num, dim]: copies of `real`, each moved to a cosine of about .98 with its original."""
    draw = np.random.default_rng(SEED)
    vectors = np.resize(real, (num, real.shape[1]))
    vectors = vectors + 0.2 / np.sqrt(real.shape[1]) * draw.standard_normal(vectors.shape, dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def traces(keys: list[str]) -> list[Trace]:
    """Returns NUM_TRACES traces of about the size of the paper's (92 tokens a step), one in four terminal."""
    value = "What the agent thought, called and saw in about ninety tokens. " * 6
    return [
        Trace(f"{n}\n{keys[n % NUM_REAL]}", f"{n} {value}", 1.0, "expert", f"task {n // 16}", n % 4, n % 4 == 3, str(n // 4 % 4))
        for n in range(NUM_TRACES)
    ]


def timed(work: Callable[[], object]) -> float:
    """Returns the seconds that a call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure_search(buffer: TraceBuffer, queries: Vectors, exact: Vectors) -> Iterator[tuple[str, str]]:
    """Gives what searching costs, single and in batches, and how often it finds what exact search finds."""
    single = [timed(lambda query=query: buffer.search_vectors(query[None])) for query in queries]
    starts = range(0, len(queries) - BATCH + 1, BATCH)
    batched = [timed(lambda first=first: buffer.search_vectors(queries[first : first + BATCH])) / BATCH for first in starts]
    found = np.array([one[0][1] for one in buffer.search_vectors(queries)])
    yield "search, one key: p50 / p95", f"{1e3 * np.median(single):.2f} / {1e3 * np.quantile(single, 0.95):.2f} ms"
    yield f"search, batches of {BATCH}: p50 a key", f"{1e3 * np.median(batched):.2f} ms"
    yield "recall@1 against exact search", f"{np.mean(found >= exact - 1e-6):.3f}"


def cold(path: Path) -> None:
    """Asks the system to forget its copy of a file."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure_buffer(folder: Path, keys: list[str], vectors: Vectors, queries: Vectors) -> Iterator[tuple[str, str]]:
    """Gives one (what, value) after another."""
    path, encoder = folder / "bench.traces", Given(vectors)
    for old in folder.glob("bench.traces*"):
        old.unlink()
    stored, allowed = traces(keys), np.arange(NUM_TRACES) % 4 != 3
    exact = np.array([one[1][0] for one in search_exactly(vectors, queries, [allowed] * len(queries), 1)])
    with TraceBuffer(path, encoder) as buffer:
        yield "adding, without embedding", f"{NUM_TRACES / timed(lambda: buffer.add(stored)):,.0f} traces/s"
        yield "building and saving the index, behind", f"{timed(buffer.settle):.1f} s"
        yield from measure_search(buffer, queries, exact)
        yield "size with index", f"{buffer.stats().num_bytes / 1e6:.0f} MB"
        yield "stats / fingerprint", f"{timed(buffer.stats):.2f} / {timed(buffer.fingerprint):.2f} s"
    opening = []
    for is_cold in (True, False):
        if is_cold:
            cold(path)
            cold(path.with_name("bench.traces.index"))
        began = time.perf_counter()
        with TraceBuffer(path, encoder) as buffer:
            buffer.search_vectors(queries[:1])
            opening.append(time.perf_counter() - began)
    yield "opening and a first search, file not cached / cached", f"{opening[0]:.2f} / {opening[1]:.2f} s"


def measure_kinds(vectors: Vectors, queries: Vectors) -> Iterator[tuple[str, str]]:
    """Gives HNSW and IVF beside each other, one key at a time on one thread, with the default filter, without the buffer."""
    import faiss

    faiss.omp_set_num_threads(1)
    allowed, every = np.arange(NUM_TRACES) % 4 != 3, np.arange(NUM_TRACES)
    exact = np.array([one[1][0] for one in search_exactly(vectors, queries, [allowed] * len(queries), 1)])

    def line(search: Callable[[Vectors], float]) -> str:
        similarities = np.zeros(len(queries))
        times = [timed(lambda n=n: similarities.__setitem__(n, search(queries[n]))) for n in range(len(queries))]
        return f"p50 {1e3 * np.median(times):.2f} ms, recall@1 {np.mean(similarities >= exact - 1e-6):.3f}"

    table = RowTable(vectors.shape[1])
    table.append(Added(every, vectors, every >= 0, ~allowed, [""] * NUM_TRACES, [""] * NUM_TRACES, [str(n) for n in every]))
    began = time.perf_counter()
    ivf = IvfIndex.build(table.rows, None, lambda: False)
    yield "IVF-SQ8", f"built in {time.perf_counter() - began:.1f} s, {len(ivf.to_bytes()) / 1e6:.0f} MB"
    for index_module.NUM_PROBES in (8, 16, 32, 64):
        yield f"  {index_module.NUM_PROBES} lists a query", line(lambda query: ivf.search(table.rows, query, allowed, 1)[1][0])
    hnsw = faiss.IndexHNSWFlat(vectors.shape[1], 32, faiss.METRIC_INNER_PRODUCT)
    hnsw.hnsw.efConstruction = 100
    yield (
        "HNSW, M 32, efConstruction 100",
        f"built in {timed(lambda: hnsw.add(vectors)):.1f} s, {len(faiss.serialize_index(hnsw)) / 1e6:.0f} MB",
    )
    selector = faiss.IDSelectorBitmap(np.packbits(allowed, bitorder="little"))
    for width in (32, 64, 128, 256):
        parameters = faiss.SearchParametersHNSW(sel=selector, efSearch=width)
        yield f"  efSearch {width}", line(lambda query, p=parameters: hnsw.search(query[None], 1, params=p)[0][0, 0])


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", default=os.environ.get("TREEGRAFT_DATA"), type=Path)
    parser.add_argument("--vectors", default=Path("keys.npy"), type=Path)
    parser.add_argument("--folder", default=None, type=Path)
    parser.add_argument("--hnsw", action="store_true", help="compare kinds of index instead; takes minutes")
    options = parser.parse_args()
    if options.data is None or not options.data.is_dir():
        parser.error(f"DATA is '{options.data}'; expected the folder of questions, as an argument or in $TREEGRAFT_DATA")
    real, keys = real_vectors(options.data, options.vectors), real_keys(options.data)
    vectors, queries = grown(real[:NUM_REAL], NUM_TRACES), real[NUM_REAL:]
    threads = os.environ.get("OMP_NUM_THREADS", "unset")
    print(f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, OMP_NUM_THREADS {threads}, seed {SEED}")
    print(f"{NUM_TRACES:,} traces grown from {NUM_REAL:,} real keys, {len(queries):,} other real keys as queries")
    with tempfile.TemporaryDirectory() as temporary:
        rows = (
            measure_kinds(vectors, queries)
            if options.hnsw
            else measure_buffer(options.folder or Path(temporary), keys, vectors, queries)
        )
        for what, value in rows:
            print(f"| {what:<52} | {value:<38} |", flush=True)


if __name__ == "__main__":
    main()
