"""Nearest passages by meaning: vectors in a file, and above 20,000 passages a FAISS index of 8-bit
copies, both mapped.

Embedding takes longest, and an interrupted build continues after its last whole block. Building the
index takes a byte of memory for each number of each vector, 8 GB for 21 million passages of MiniLM;
a search loads only the parts of the files that its query reads.
"""

from __future__ import annotations

import array
import json
import logging
import math
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from treegraft.extras.search.corpus import Row
from treegraft.parts import Encoder, files, nearest, packages

FORMAT = 2
"""Version of the files; raised whenever their layout changes."""
FLAT_LIMIT = 20_000
"""Passages up to which a search is exact."""
BLOCK = 2_048
"""Passages that are embedded, and enter the index, together."""
NUM_CANDIDATES = 32
"""Passages that are scored again, and four more for each one wanted."""
NUM_PROBES = 32
PROBED_FRAC = 1 / 32
"""Lists that a query reads: NUM_PROBES, or this share of all if it is more."""
LISTS_PER_ROOT = 2.5
"""Lists for each square root of the passages, rounded to a power of two: 1,024 for 160,000."""
SAMPLE_PER_LIST = 64
"""Vectors that centroids are fitted to, for each list."""

_REPORTED = 100_000
"""Passages between two lines about the progress of a build."""

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
        self._lists: Any = None
        faiss = load_faiss()
        if len(self.offsets) > FLAT_LIMIT:
            flags = faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY
            self._lists = faiss.read_index(str(folder / "lists.faiss"), flags)
            self._lists.nprobe = max(NUM_PROBES, round(self._lists.nlist * PROBED_FRAC))
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

    def search(self, queries: Sequence[str], top_k: int) -> list[nearest.Hits]:
        """Returns the nearest passages of each query, best first, and their cosines; `top_k` or all
        there are."""
        vectors = self._encoder.encode(queries)
        if self._lists is None:
            everything = np.ones(len(self._vectors), bool)
            masks = [everything] * len(queries)
            stored = self._vectors.astype(np.float32, copy=False)
            return nearest.search_exactly(stored, vectors, masks, top_k)
        return list(self._threads.map(lambda query: self._nearest(query, top_k), vectors))

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown()

    def _nearest(self, query: npt.NDArray[np.float32], top_k: int) -> nearest.Hits:
        _, rows = self._lists.search(query[None], NUM_CANDIDATES + 4 * top_k)
        # In the order of the file, which reads best.
        candidates = np.sort(rows[0][rows[0] >= 0])
        return nearest.score(self._vectors, candidates, query, top_k)

    @staticmethod
    def build(rows: Iterable[Row], folder: Path, encoder: Encoder) -> None:
        """Writes the files of an index to the folder; vectors of an earlier attempt stay."""
        progress = folder / "progress.json"
        try:
            done = int(json.loads(progress.read_text(encoding="utf-8"))["rows"])
        except (OSError, ValueError, KeyError, TypeError):
            done = 0
        offsets = array.array("Q")
        with (folder / "vectors.f16").open("ab") as file:
            # Bytes after the last whole block may be a part of one.
            file.truncate(done * encoder.dim * 2)
            ordered = iter(rows)
            while block := list(islice(ordered, BLOCK)):
                # Offsets are not stored between attempts: reading the corpus again is cheap.
                offsets.extend(row.offset for row in block)
                if len(offsets) <= done:
                    continue
                vectors = encoder.encode([row.contents for row in block])
                file.write(vectors.astype(np.float16).tobytes())
                # The count may reach the disk only after the vectors that it counts.
                file.flush()
                os.fsync(file.fileno())
                files.write_atomically(progress, json.dumps({"rows": len(offsets)}))
                if len(offsets) // _REPORTED > (len(offsets) - len(block)) // _REPORTED:
                    _log.warning("%d passages embedded", len(offsets))
        np.save(folder / "offsets.npy", np.frombuffer(offsets, np.uint64))
        if len(offsets) > FLAT_LIMIT:
            save_lists(_stored(folder, len(offsets), encoder.dim), folder / "lists.faiss")


def _stored(folder: Path, num_rows: int, dim: int) -> npt.NDArray[np.floating[Any]]:
    return np.memmap(folder / "vectors.f16", np.float16, "r", shape=(num_rows, dim))


def save_lists(vectors: npt.NDArray[np.floating[Any]], path: Path) -> None:
    """Writes an index of [rows, dim] unit vectors: 8-bit copies in lists around centroids (IVF).
    The vectors may lie in a file."""
    faiss = load_faiss()
    num, dim = vectors.shape
    num_lists = 1 << round(math.log2(LISTS_PER_ROOT * math.sqrt(num)))
    index = faiss.index_factory(dim, f"IVF{num_lists},SQ8", faiss.METRIC_INNER_PRODUCT)
    index.cp.min_points_per_centroid = 1  # else it warns of fewer than 39
    # Evenly spread: neighbours in the file are often alike.
    num_sampled = min(num, SAMPLE_PER_LIST * num_lists)
    sample = vectors[np.linspace(0, num - 1, num_sampled).astype(np.int64)].astype(np.float32)
    _log.warning("fitting centroids for %d passages", num)
    # For this thread only: a sum over several threads depends on their number.
    faiss.omp_set_num_threads(1)
    index.train(sample)
    for start in range(0, num, BLOCK):
        index.add(vectors[start : start + BLOCK].astype(np.float32))
    partial = path.with_suffix(".partial")
    faiss.write_index(index, str(partial))
    os.replace(partial, path)


def load_faiss() -> Any:
    """Returns the library, untyped, since its stubs lack most arguments."""
    packages.require("a dense index", "faiss")
    import faiss

    return faiss
