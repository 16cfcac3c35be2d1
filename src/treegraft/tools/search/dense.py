"""Nearest passages by meaning: vectors in a file, and above 20,000 passages a FAISS index of 8-bit
copies beside it, both mapped.

Embedding takes longest, and an interrupted build continues after its last whole block. While it
runs, memory holds one block of passages, the sample that centroids are fitted to, and one shard of
the index; a search holds only the parts of the files that its query reads.
"""

from __future__ import annotations

import array
import json
import logging
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from treegraft.core.files import write_atomically
from treegraft.tools.search.corpus import Row
from treegraft.tools.search.encoders import Encoder
from treegraft.tools.search.nearest import (
    BLOCK,
    FLAT_LIMIT,
    NUM_CANDIDATES,
    NUM_PROBES,
    ON_DISK,
    Hits,
    fit,
    load_faiss,
    num_fitted,
    score,
    search_exactly,
)

FORMAT = 1
"""Version of the files; raised whenever their layout changes."""
SHARD = 1 << 21
"""Rows of one file of the index, which is in memory while it is built: 800 MB for MiniLM."""
PROBED_FRAC = 1 / 32
"""Share of the lists that a query reads, where that is more than NUM_PROBES."""
_REPORT_S = 10.0

_log = logging.getLogger(__name__)


class DenseIndex:
    """Finds the passages whose vectors are nearest to a query's, by cosine.

    A query's results do not depend on the other queries of its batch.
    """

    def __init__(self, folder: Path, encoder: Encoder, *, num_threads: int | None = None) -> None:
        """Opens the files of `build`, which used the same encoder.

        Args:
            num_threads: searches that run at once; None means one for each processor.
        """
        self.offsets: npt.NDArray[np.uint64] = np.load(folder / "offsets.npy", mmap_mode="r")
        """[passages] where each begins in the corpus, in bytes."""
        self._encoder = encoder
        self._vectors = _stored(folder, len(self.offsets), encoder.dim)
        self._shards: list[Any] = []
        faiss = load_faiss()
        if len(self.offsets) > FLAT_LIMIT:
            flags = faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY
            for path in shard_paths(folder, len(self.offsets)):
                shard = faiss.read_index(str(path), flags)
                shard.nprobe = max(NUM_PROBES, round(shard.nlist * PROBED_FRAC))
                self._shards.append(shard)
        else:
            self._vectors = self._vectors.astype(np.float32)
        # FAISS's own threads would share one query out, and its sums would depend on their number;
        # here each query has one thread.
        self._threads = ThreadPoolExecutor(
            num_threads or len(os.sched_getaffinity(0)),
            "dense search",
            initializer=faiss.omp_set_num_threads,
            initargs=(1,),
        )

    def search(self, queries: Sequence[str], top_k: int) -> list[Hits]:
        """Returns the nearest passages of each query, best first, and their cosines; `top_k` or all
        there are."""
        return self.search_vectors(self._encoder.encode(queries), top_k)

    def search_vectors(self, queries: npt.NDArray[np.float32], top_k: int) -> list[Hits]:
        """Returns the same for [queries, dim] vectors of unit length."""
        if not self._shards:
            vectors = self._vectors.astype(np.float32, copy=False)
            everything = np.ones(len(vectors), bool)
            return search_exactly(vectors, queries, [everything] * len(queries), top_k)
        return list(self._threads.map(lambda query: self._nearest(query, top_k), queries))

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown()

    def _nearest(self, query: npt.NDArray[np.float32], top_k: int) -> Hits:
        num = NUM_CANDIDATES + 4 * top_k
        # All shards have the same centroids.
        first = self._shards[0]
        nearness, lists = first.quantizer.search(query[None], first.nprobe)
        found = [
            shard.search_preassigned(query[None], num, lists, nearness) for shard in self._shards
        ]
        rough = np.concatenate([scores[0] for scores, _ in found])
        rows = np.concatenate(
            [rows[0] + number * SHARD * (rows[0] >= 0) for number, (_, rows) in enumerate(found)]
        )
        best = rows[np.argsort(-rough, kind="stable")[:num]]
        # In the order of the file, which reads best.
        return score(self._vectors, np.sort(best[best >= 0]), query, top_k)

    @staticmethod
    def build(rows: Iterable[Row], folder: Path, encoder: Encoder) -> None:
        """Writes the files of an index to the folder; vectors of an earlier attempt are kept."""
        progress = folder / "progress.json"
        try:
            done = int(json.loads(progress.read_text(encoding="utf-8"))["rows"])
        except (OSError, ValueError, KeyError, TypeError):
            done = 0
        offsets = array.array("Q")
        began = reported = time.monotonic()
        with (folder / "vectors.f16").open("ab") as file:
            # Bytes after the last whole block may be a part of one.
            file.truncate(done * encoder.dim * 2)
            ordered = iter(rows)
            while block := list(islice(ordered, BLOCK)):
                # Offsets are not kept between attempts: reading the corpus again is cheap.
                offsets.extend(row.offset for row in block)
                if len(offsets) <= done:
                    continue
                vectors = encoder.encode([row.contents for row in block])
                file.write(vectors.astype(np.float16).tobytes())
                # The count may reach the disk only after the vectors that it counts.
                file.flush()
                os.fsync(file.fileno())
                write_atomically(progress, json.dumps({"rows": len(offsets)}))
                if time.monotonic() - reported > _REPORT_S:
                    reported = time.monotonic()
                    speed = (len(offsets) - done) / (reported - began)
                    _log.warning("%d passages embedded, %.0f a second", len(offsets), speed)
        np.save(folder / "offsets.npy", np.frombuffer(offsets, np.uint64))
        if len(offsets) > FLAT_LIMIT:
            save_lists(_stored(folder, len(offsets), encoder.dim), folder)


def _stored(folder: Path, num_rows: int, dim: int) -> npt.NDArray[np.floating[Any]]:
    return np.memmap(folder / "vectors.f16", np.float16, "r", shape=(num_rows, dim))


def shard_paths(folder: Path, num_rows: int) -> list[Path]:
    """Returns the files of an index over `num_rows` rows, in order; each holds SHARD rows, the last
    one the rest."""
    return [folder / f"lists-{number}.faiss" for number in range(-(-num_rows // SHARD))]


def save_lists(vectors: npt.NDArray[np.floating[Any]], folder: Path) -> None:
    """Writes an index of [rows, dim] unit vectors: shards of lists around the same centroids.
    Existing shards are kept."""
    faiss = load_faiss()
    # For this thread only: a sum over several threads depends on their number.
    faiss.omp_set_num_threads(1)
    empty: Any = None  # fitted only where a shard is missing, since that takes longest
    for number, path in enumerate(shard_paths(folder, len(vectors))):
        if path.exists():
            continue
        if empty is None:
            _log.warning("fitting centroids for %d passages", len(vectors))
            empty = fit(vectors[: num_fitted(len(vectors))], ON_DISK)
        shard = faiss.clone_index(empty)
        last = min((number + 1) * SHARD, len(vectors))
        for start in range(number * SHARD, last, BLOCK):
            shard.add(vectors[start : min(start + BLOCK, last)].astype(np.float32))
        partial = path.with_suffix(".partial")
        faiss.write_index(shard, str(partial))
        os.replace(partial, path)
        del shard
        _log.warning("%d of %d passages indexed", last, len(vectors))
