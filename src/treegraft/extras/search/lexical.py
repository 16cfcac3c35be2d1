"""BM25 over passages by the bm25s library, whose index is stored in files and memory-mapped.

    score(q, d) = Σ over words w of q:  idf(w) · f / (f + k1 · (1 - b + b · |d| / mean |d|))
    idf(w)      = ln(1 + (N - n_w + 0.5) / (n_w + 0.5))

Source: Lucene's variant as in Kamphuis et al. 2020 and bm25s (Lù 2024, arXiv 2407.03618). N
passages, n_w of them with the word, f times in d, |d| words in d. Scores are computed when the
index is built. Building takes about 40 bytes of memory for each word of the corpus, but does not
hold the text; of a loaded index only the vocabulary is held.
"""

from __future__ import annotations

import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
import numpy.typing as npt

from treegraft import DataError
from treegraft.extras.search.corpus import Row

FORMAT = 2
"""Version of the files; raised whenever their layout changes."""
K1 = 1.5
B = 0.75
"""Parameters of the formula; the defaults of bm25s."""
# The pattern of bm25s drops words of one character, such as the number in "Apollo 8".
_WORDS = r"(?u)\b\w+\b"

Found = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]
"""Rows, best first, and their scores."""


class LexicalIndex:
    """Finds passages by the words that they share with a query."""

    def __init__(self, bm25: bm25s.BM25, offsets: npt.NDArray[np.uint64]) -> None:
        self._bm25 = bm25
        self.offsets = offsets
        """[passages] where each begins in the corpus, in bytes."""

    @classmethod
    def build(cls, rows: Iterable[Row], corpus: Path) -> LexicalIndex:
        """Returns an index in memory; the rows are read once.

        Raises:
            DataError: no row has a word to search for.
        """
        offsets = array.array("Q")

        def contents() -> Iterator[str]:
            for row in rows:
                offsets.append(row.offset)
                yield row.contents

        bm25 = _index(contents())
        if bm25 is None:
            raise DataError(
                f"corpus '{corpus}': none of its {len(offsets)} rows contains a searchable word.",
                code="corpus-without-words",
            )
        return cls(bm25, np.frombuffer(offsets, np.uint64))

    def save(self, folder: Path) -> None:
        """Writes the files of the index to a folder."""
        self._bm25.save(folder, show_progress=False)
        np.save(folder / "offsets.npy", self.offsets)

    @classmethod
    def load(cls, folder: Path) -> LexicalIndex:
        """Returns a saved index; its arrays are memory-mapped."""
        bm25 = bm25s.BM25.load(folder, mmap=True, show_progress=False)
        return cls(bm25, np.load(folder / "offsets.npy", mmap_mode="r"))

    def search(self, queries: Sequence[str], top_k: int) -> list[Found]:
        """Returns the best passages of each query, `top_k` at most; only those that share a word
        with it."""
        return [_best(_scores(self._bm25, query), top_k) for query in queries]

    def close(self) -> None:
        """Releases the arrays and with them the files."""
        # bm25s has no way to close; a mapped file is released with its last array.
        self._bm25.scores = {}


def _tokenize(texts: Iterable[str], *, return_ids: bool) -> Any:
    """Cuts texts into lower-case words without English stop words."""
    return bm25s.tokenize(
        texts, token_pattern=_WORDS, stopwords="en", return_ids=return_ids, show_progress=False
    )


def _index(texts: Iterable[str]) -> bm25s.BM25 | None:
    """Returns the scores of all words in all texts, None where there is no word."""
    words = _tokenize(texts, return_ids=True)
    if not words.vocab:
        return None
    # A backend by name, so that results do not depend on whether numba is installed.
    bm25 = bm25s.BM25(method="lucene", k1=K1, b=B, backend="numpy")
    # Without the empty word, which has no scores.
    bm25.index(words, create_empty_token=False, show_progress=False)
    return bm25


def _scores(bm25: bm25s.BM25, query: str) -> npt.NDArray[np.float32]:
    (words,) = _tokenize([query], return_ids=False)
    scores: npt.NDArray[np.float32] = bm25.get_scores_from_ids(bm25.get_tokens_ids(words))
    return scores


def _best(scores: npt.NDArray[np.float32], top_k: int) -> Found:
    """Returns the `top_k` largest positive scores, best first, ties by row."""
    # Everything that ties with the last place stays in: the row decides, not the partition.
    threshold = np.partition(scores, -top_k)[-top_k] if top_k < len(scores) else 0.0
    rows = np.flatnonzero((scores >= threshold) & (scores > 0))
    rows = rows[np.argsort(-scores[rows], kind="stable")][:top_k]
    return rows, scores[rows]
