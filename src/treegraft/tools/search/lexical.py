"""BM25 over any number of passages: postings are made in two passes on disk and memory-mapped
afterwards.

    score(q, d) = Σ over words w of q:  ln(1 + (N - n_w + 0.5) / (n_w + 0.5)) · f / (f + k1 · (1 - b + b · |d| / mean |d|))

Source: Lucene's variant as in Kamphuis et al. 2020 and bm25s (Lù 2024, arXiv 2407.03618), which
cuts texts into words here. N passages, n_w of them with the word, f times in d, |d| words in d. As
in bm25s, scores are worked out when the index is made. bm25s itself holds all words of the corpus
in memory while it counts; here memory grows with the vocabulary and by a few bytes for each
passage.
"""

from __future__ import annotations

import array
import bisect
import mmap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
import numpy.typing as npt

from treegraft.core.errors import DataError
from treegraft.tools.search.corpus import Row

FORMAT = 1
"""Of the files; raised whenever they are made in another way."""
K1, B = 1.5, 0.75
"""Of the formula; bm25s' defaults."""
_WORDS = r"(?u)\b\w+\b"
_ROWS = 2_000
"""Passages that are cut into words together."""
_POSTINGS = 1 << 21
"""Postings that are sorted together."""
_POSTING = np.dtype([("term", "<u4"), ("row", "<u4"), ("count", "<u4")])

Found = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]
"""Rows, best first, and their scores."""


def words_of(texts: list[str]) -> list[list[str]]:
    """Returns the lower-case words of each text, English stop words left out."""
    words: list[list[str]] = bm25s.tokenize(
        texts, token_pattern=_WORDS, stopwords="en", return_ids=False, show_progress=False
    )
    return words


def best(scores: npt.NDArray[np.float32], top_k: int) -> Found:
    """Returns the `top_k` largest positive scores, best first, ties by row."""
    if top_k < len(scores):
        # Everything that ties with the last place stays in, so that the row and not the partition
        # decides.
        threshold = np.partition(scores, -top_k)[-top_k]
        rows = np.flatnonzero((scores >= threshold) & (scores > 0))
    else:
        rows = np.flatnonzero(scores > 0)
    rows = rows[np.argsort(-scores[rows], kind="stable")][:top_k]
    return rows, scores[rows]


class LexicalIndex:
    """Finds passages by the words they share with a query."""

    def __init__(self, folder: Path, *, mapped: bool = True) -> None:
        """Opens what `build` made.

        Args:
            mapped: leave the files on disk; False reads them, so that the folder is needed no
                more.
        """

        def load(name: str) -> npt.NDArray[Any]:
            found: npt.NDArray[Any] = np.load(folder / name, mmap_mode="r" if mapped else None)
            return found

        self.offsets: npt.NDArray[np.uint64] = load("offsets.npy")
        """[passages] where each begins in the corpus, in bytes."""
        self._starts, self._rows, self._scores = (
            load("starts.npy"),
            load("rows.npy"),
            load("scores.npy"),
        )
        self._ends = load("words.npy")
        with (folder / "words.txt").open("rb") as file:
            self._words: bytes | mmap.mmap = (
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if mapped else file.read()
            )

    def search(self, queries: Sequence[str], top_k: int) -> list[Found]:
        """Returns the best passages of each query, `top_k` at most; only such as share a word with
        it."""
        return [best(self._scores_of(query), top_k) for query in queries]

    def close(self) -> None:
        """Lets go of the files."""
        if isinstance(self._words, mmap.mmap):
            self._words.close()
        self._words = b""

    def _scores_of(self, query: str) -> npt.NDArray[np.float32]:
        scores = np.zeros(len(self.offsets), np.float32)
        for word in words_of([query])[0]:
            term = self._term(word)
            if term is not None:
                start, end = int(self._starts[term]), int(self._starts[term + 1])
                # A passage stands once among the postings of a word.
                scores[self._rows[start:end]] += self._scores[start:end]
        return scores

    def _term(self, word: str) -> int | None:
        sought = word.encode("utf-8", "surrogatepass")
        place = bisect.bisect_left(range(len(self._ends)), sought, key=self._word)
        return place if place < len(self._ends) and self._word(place) == sought else None

    def _word(self, term: int) -> bytes:
        return self._words[int(self._ends[term - 1]) if term else 0 : int(self._ends[term])]

    @staticmethod
    def build(rows: Iterable[Row], folder: Path, corpus: Path) -> None:
        """Makes the files of an index in the folder.

        Raises:
            DataError: no row has a word to search for.
        """
        offsets, lengths = array.array("Q"), array.array("I")
        vocabulary: dict[str, int] = {}
        found_in = array.array("Q")
        spill = folder / "postings.partial"
        with spill.open("wb") as file:
            for some in _groups(rows):
                offsets.extend(row.offset for row in some)
                file.write(
                    _count(
                        words_of([row.contents for row in some]), vocabulary, lengths, found_in
                    ).tobytes()
                )
        if not vocabulary:
            raise DataError(
                f"corpus '{corpus}': none of its {len(offsets)} rows contains a searchable word."
            )
        ranks = _save_words(vocabulary, folder)
        del vocabulary
        _save_postings(
            spill,
            folder,
            ranks,
            np.frombuffer(found_in, np.uint64),
            np.frombuffer(lengths, np.uint32),
        )
        np.save(folder / "offsets.npy", np.frombuffer(offsets, np.uint64))
        spill.unlink()


def _groups(rows: Iterable[Row]) -> Iterator[list[Row]]:
    group: list[Row] = []
    for row in rows:
        group.append(row)
        if len(group) == _ROWS:
            yield group
            group = []
    if group:
        yield group


def _count(
    texts: list[list[str]],
    vocabulary: dict[str, int],
    lengths: array.array[int],
    found_in: array.array[int],
) -> npt.NDArray[Any]:
    """Returns the postings of these texts in order; takes down words, lengths, and how many texts
    have each word."""
    postings: list[tuple[int, int, int]] = []
    for words in texts:
        row = len(lengths)
        lengths.append(len(words))
        for word, count in Counter(words).items():
            term = vocabulary.setdefault(word, len(vocabulary))
            if term == len(found_in):
                found_in.append(0)
            found_in[term] += 1
            postings.append((term, row, count))
    return np.array(postings, _POSTING)


def _save_words(vocabulary: dict[str, int], folder: Path) -> npt.NDArray[np.int64]:
    """Writes the words in the order of their bytes; returns [terms] the place of each in that
    order."""
    words = sorted(
        (word.encode("utf-8", "surrogatepass"), term) for word, term in vocabulary.items()
    )
    ranks = np.zeros(len(words), np.int64)
    ranks[[term for _, term in words]] = np.arange(len(words))
    np.save(folder / "words.npy", np.cumsum([len(word) for word, _ in words]))
    with (folder / "words.txt").open("wb") as file:
        file.writelines(word for word, _ in words)
    return ranks


def _save_postings(
    spill: Path,
    folder: Path,
    ranks: npt.NDArray[np.int64],
    found_in: npt.NDArray[np.uint64],
    lengths: npt.NDArray[np.uint32],
) -> None:
    """Sorts the postings by term into files: each goes to the next free place of its term."""
    per_rank = np.zeros(len(ranks), np.int64)
    per_rank[ranks] = found_in
    starts = np.concatenate([[0], np.cumsum(per_rank)])
    np.save(folder / "starts.npy", starts)
    weight = np.log(1 + (len(lengths) - per_rank + 0.5) / (per_rank + 0.5))
    damping = K1 * (1 - B + B * lengths / lengths.mean())
    num = int(starts[-1])
    rows = np.lib.format.open_memmap(folder / "rows.npy", "w+", np.uint32, (num,))
    scores = np.lib.format.open_memmap(folder / "scores.npy", "w+", np.float32, (num,))
    free = starts[:-1].copy()
    for first in range(0, num, _POSTINGS):
        some = np.fromfile(
            spill, _POSTING, min(_POSTINGS, num - first), offset=first * _POSTING.itemsize
        )
        terms = ranks[some["term"]]
        order = np.argsort(terms, kind="stable")
        some, terms = some[order], terms[order]
        kinds, firsts, counts = np.unique(terms, return_index=True, return_counts=True)
        places = free[terms] + np.arange(len(terms)) - np.repeat(firsts, counts)
        free[kinds] += counts
        rows[places] = some["row"]
        scores[places] = weight[terms] * some["count"] / (some["count"] + damping[some["row"]])
    rows.flush()
    scores.flush()
