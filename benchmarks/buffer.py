"""The Step-Trace Buffer with 170,000 traces: search, recall, opening, and kills during `add`.

python benchmarks/buffer.py [DATA] [--vectors FILE.npy] [--folder FOLDER] [--kills 30] [--skip-hnsw]

Real keys are the questions of DATA (default $TREEGRAFT_DATA), and histories made of questions and recorded searches; MiniLM embeds
them once into FILE.npy. 20,000 of them are grown to 170,000 by small perturbations, the other 1,000 are the queries.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from treegraft.traces.embed import build_encoder

Vectors = npt.NDArray[np.float32]

SEED = 0
NUM_REAL, NUM_QUERIES, NUM_TRACES = 20_000, 1_000, 170_000
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", default=os.environ.get("TREEGRAFT_DATA"), type=Path)
    parser.add_argument("--vectors", default=Path("keys.npy"), type=Path)
    options = parser.parse_args()
    real_vectors(options.data, options.vectors)
