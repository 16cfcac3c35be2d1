"""The Step-Trace Buffer with 170,000 traces: search against exact search, and adding and opening
against the file alone.

With $TREEGRAFT_DATA (a folder of questions and recorded searches) keys are real: questions, and
histories made of questions and searches, embedded once by MiniLM into the work folder; 20,000 of
them are grown to 170,000 by small perturbations (cosine about .98), and 1,000 others are the
queries. Without it vectors are generated, in clusters. Searches use the default filter (no terminal
traces) and read the traces they find from the file; embedding is not in their times. Kills during
`add` are a test.
"""

from __future__ import annotations

import json
import os
import random
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.speed.growth import generated_vectors
from benchmarks.speed.measure import Case, Row, Side, alternate, time_row
from benchmarks.speed.stage import Stage
from treegraft.core.types import Trace
from treegraft.tools.search.encoders import Encoder, build_encoder
from treegraft.tools.search.nearest import search_exactly
from treegraft.traces.buffer import TraceBuffer

Vectors = npt.NDArray[np.float32]

SEED = 0
DIM = 384
BATCH = 64
NUM_REAL = 20_000
NUM_QUERIES = 1_000
NUM_TRACES = 170_000
RESULT_CHARACTERS = 300
"""Of a recorded search, in a key."""
KEYS = (1, 4, 16, 64)


@dataclass(frozen=True, slots=True)
class Stock:
    """What is stored and asked for."""

    vectors: Vectors
    """[traces, DIM] of unit length."""
    queries: Vectors
    keys: tuple[str, ...]
    """[traces] or fewer; they repeat."""

    @property
    def allowed(self) -> npt.NDArray[np.bool_]:
        """[traces] those that are not terminal: three of four."""
        flags: npt.NDArray[np.bool_] = np.arange(len(self.vectors)) % 4 != 3
        return flags

    def traces(self) -> list[Trace]:
        """Returns traces of about the size of the paper's (92 tokens a step), one in four
        terminal."""
        value = "What the agent thought, called and saw in about ninety tokens. " * 6
        return [
            Trace(
                key=f"{n}\n{self.keys[n % len(self.keys)]}",
                value=f"{n} {value}",
                reward=1.0,
                source="expert",
                task_id=f"task {n // 16}",
                position=n % 4,
                terminal=n % 4 == 3,
                trajectory=str(n // 4),
            )
            for n in range(len(self.vectors))
        ]


def cases(stage: Stage) -> Mapping[str, Case]:
    """Returns the parts of `python -m benchmarks.speed buffer`."""
    parts = {"search": _search, "file": _file, "embedding": _embedding}
    return {name: partial(part, stage) for name, part in parts.items()}


class Given:
    """Stands in for MiniLM: the vector of "n\\n..." is row n."""

    name = "minilm"
    dim = DIM

    def __init__(self, vectors: Vectors) -> None:
        self._vectors = vectors

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Returns the rows, for the buffer's own probe the first one."""
        numbers = [text.partition("\n")[0] for text in texts]
        return self._vectors[[int(number) if number.isdigit() else 0 for number in numbers]]


# ---------------------------------------------------------------------- parts


def _search(stage: Stage) -> Iterator[Row]:
    """Finding the nearest trace, one key at a time and in batches."""
    stock = _stock(stage)
    with TraceBuffer(_fresh(stage), Given(stock.vectors)) as buffer:
        buffer.add(stock.traces())
        what = f"the nearest of {len(stock.vectors):,} traces"
        for batch in (1, BATCH):
            starts = range(0, len(stock.queries), batch)

            def ours(_: int, batch: int = batch, starts: Sequence[int] = starts) -> None:
                for first in starts:
                    buffer.search_vectors(stock.queries[first : first + batch])

            def theirs(_: int, batch: int = batch, starts: Sequence[int] = starts) -> None:
                for first in starts:
                    some = stock.queries[first : first + batch]
                    search_exactly(stock.vectors, some, [stock.allowed] * len(some), 1)

            seconds = alternate({"ours": Side(ours), "exact": Side(theirs)}, stage.num_runs)
            row = time_row(
                f"{what}, {batch} at once",
                "the search alone, without reading traces",
                seconds["ours"],
                seconds["exact"],
            )
            yield _per(row, len(stock.queries), 1000, "ms a key")


def _file(stage: Stage) -> Iterator[Row]:
    """Adding and opening, without embedding, against what the file itself costs."""
    stock = _stock(stage)
    path = _fresh(stage)
    traces = stock.traces()

    def add(_: int) -> None:
        with TraceBuffer(path, Given(stock.vectors)) as buffer:
            buffer.add(traces)

    seconds = alternate(
        {
            "ours": Side(add, before=lambda _: _remove(path)),
            "file": Side(
                lambda _: _plain_file(path, stock, traces), before=lambda _: _remove(path)
            ),
        },
        stage.num_runs,
    )
    row = time_row(
        f"adding {len(traces):,} traces",
        "the same texts and vectors in plain SQLite",
        seconds["ours"],
        seconds["file"],
    )
    yield replace(
        _per(row, len(traces), 1, "traces/s"),
        ours=len(traces) / row.ours,
        theirs=len(traces) / row.theirs,
    )
    _remove(path)
    with TraceBuffer(path, Given(stock.vectors)) as buffer:
        buffer.add(traces)

    def open_it(_: int) -> None:
        with TraceBuffer(path, Given(stock.vectors)) as buffer:
            buffer.search_vectors(stock.queries[:1])

    files = [file for file in path.parent.glob(f"{path.name}*") if file.is_file()]
    sides = {
        "ours": Side(open_it),
        "bytes": Side(lambda _: sum(len(file.read_bytes()) for file in files)),
    }
    seconds = alternate(sides, stage.num_runs)
    size = sum(file.stat().st_size for file in files)
    yield time_row(
        f"opening {len(traces):,} traces and a first search",
        f"reading its {size / 1e6:.0f} MB",
        seconds["ours"],
        seconds["bytes"],
    )


def _embedding(stage: Stage) -> Iterator[Row]:
    """Embedding new keys of some 80 tokens by MiniLM, as many as ask together, in the type that is
    taken here against float32."""
    ours = build_encoder("minilm")
    plain = build_encoder("minilm", dtype="float32")
    value = "What the agent thought, called and saw in about eighty tokens. " * 6

    def texts(count: int, run: int) -> list[str]:
        return [f"{count} keys, run {run}, {n}. {value}" for n in range(count)]

    for count in stage.pick(KEYS, (1, 2)):
        cosine = float(
            (ours.encode(texts(count, -1)) * plain.encode(texts(count, -1))).sum(axis=1).min()
        )
        asked = partial(texts, count)
        sides = {
            "ours": Side(partial(_embed, ours, asked)),
            "plain": Side(partial(_embed, plain, asked)),
        }
        seconds = alternate(sides, stage.num_runs)
        what = f"embedding {count} keys at once, cosine {cosine:.4f}"
        yield _per(
            time_row(what, "MiniLM in float32", seconds["ours"], seconds["plain"]),
            count,
            1000,
            "ms a key",
        )


def _embed(encoder: Encoder, texts: Callable[[int], list[str]], run: int) -> None:
    encoder.encode(texts(run))


def _per(row: Row, count: int, scale: float, unit: str) -> Row:
    return replace(row, ours=scale * row.ours / count, theirs=scale * row.theirs / count, unit=unit)


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _fresh(stage: Stage) -> Path:
    path = stage.folder / "bench.traces"
    _remove(path)
    return path


def _remove(path: Path) -> None:
    for old in path.parent.glob(f"{path.name}*"):
        old.unlink()


def _plain_file(path: Path, stock: Stock, traces: Sequence[Trace]) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute(
            "CREATE TABLE traces (id INTEGER PRIMARY KEY, key TEXT, value TEXT, vector BLOB)"
        )
        rows = zip(traces, stock.vectors, strict=True)
        connection.executemany(
            "INSERT INTO traces (key, value, vector) VALUES (?, ?, ?)",
            ((t.key, t.value, v.tobytes()) for t, v in rows),
        )
    connection.close()


# ---------------------------------------------------------------------- keys


def _stock(stage: Stage) -> Stock:
    num, num_queries = stage.pick((NUM_TRACES, NUM_QUERIES), (400, 20))
    data = os.environ.get("TREEGRAFT_DATA")
    if data and not stage.is_quick:
        folder = Path(data)
        keys = real_keys(folder)
        real = real_vectors(stage, folder, stage.folder / "keys.npy")
        return Stock(grown(real[:NUM_REAL], num), real[NUM_REAL:], tuple(keys[:NUM_REAL]))
    stage.note("vectors are generated; with $TREEGRAFT_DATA they are those of real keys")
    words = tuple(
        f"question {n} of a generated stock, with a step and what it found" for n in range(1000)
    )
    return Stock(generated_vectors(num, DIM, 2), generated_vectors(num_queries, DIM, 3), words)


def grown(real: Vectors, num: int) -> Vectors:
    """Returns [num, dim]: copies of `real`, each moved to a cosine of about .98 with its
    original."""
    draw = np.random.default_rng(SEED)
    vectors = np.resize(real, (num, real.shape[1]))
    vectors = vectors + 0.2 / np.sqrt(real.shape[1]) * draw.standard_normal(
        vectors.shape, dtype=np.float32
    )
    moved: Vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    return moved


def questions(data: Path) -> list[str]:
    """Returns every question of the folder once."""
    import pyarrow.parquet as parquet

    found: list[str] = []
    for path in sorted((data / "rl").glob("*.parquet")):
        found += [
            row["extra_info"]["question"]
            for row in parquet.read_table(path, columns=["extra_info"]).to_pylist()
        ]
    for path in sorted((data / "benchmarks").glob("*.jsonl")):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        found += [row.get("question") or row["problem"] for row in rows]
    return list(dict.fromkeys(" ".join(question.split()) for question in found))


def histories(asked: Sequence[str], data: Path, num: int) -> Iterator[str]:
    """Gives keys of a question, a recorded search that shares most words with it, and the beginning
    of the result."""
    recorded = json.loads((data / "rl" / "search_cache.json").read_text(encoding="utf-8"))
    words = [set(question.lower().split()) for question in asked]
    rounds = -(-num // len(recorded))
    made = 0
    for query, result in recorded.items():
        sought = set(query.lower().split())
        shares = [len(sought & some) / len(sought | some) for some in words]
        for place in sorted(range(len(asked)), key=lambda place: -shares[place])[:rounds]:
            if made < num:
                yield (
                    f"{asked[place]}\nsearch"
                    f" {query}\n{' '.join(result.split())[:RESULT_CHARACTERS]}"
                )
                made += 1


def real_keys(data: Path) -> list[str]:
    """Returns NUM_REAL + NUM_QUERIES different keys in a random order."""
    asked = questions(data)
    keys = [*asked, *histories(asked, data, NUM_REAL + NUM_QUERIES - len(asked))]
    random.Random(SEED).shuffle(keys)
    return keys


def real_vectors(stage: Stage, data: Path, path: Path) -> Vectors:
    """Returns [keys, DIM], embedded once; a run that was cut off goes on where it stood."""
    if path.exists():
        loaded: Vectors = np.load(path)
        return loaded
    keys = real_keys(data)
    encoder = build_encoder("minilm")
    # Neighbours of like length share a forward pass.
    order = sorted(range(len(keys)), key=lambda place: len(keys[place]))
    partial_path = path.with_suffix(".partial.npy")
    done = list(np.load(partial_path)) if partial_path.exists() else []
    for first in range(len(done), len(keys), 512):
        done += list(encoder.encode([keys[place] for place in order[first : first + 512]]))
        np.save(partial_path, np.stack(done))
        stage.say(f"   {len(done)} of {len(keys)} keys embedded")
    vectors = np.zeros((len(keys), encoder.dim), np.float32)
    vectors[order] = np.stack(done)
    np.save(path, vectors)
    partial_path.unlink(missing_ok=True)
    return vectors
