"""Keys as vectors without a model: hashed words, the same on every machine and whatever else is in the buffer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

BLOCK = 256
"""Dimensions of each of the two blocks; one bit of a hash per dimension."""
NUM_NEWEST = 12
"""Words from the end of the history that count."""
_WORD, _TRIPLE, _LINE = 2, 3, 6
"""Weights in the question's block. Triples tell "r1 of r2" from "r2 of r1"; the line as a whole tells any two questions apart."""


class HashingEncoder:
    """Two bags of hashed words: the question (the key's first line), and the newest step (the last words of the rest).

    Each feature is one random vector of signs, the bits of its hash (random indexing, Kanerva et al. 2000); a block is their
    weighted sum at unit length, a key both blocks side by side. So the cosine of two keys is the mean of how alike their
    questions and how alike their newest steps are, give or take 1/16. All sums are of integers, so no machine rounds another way.
    """

    name = "hashing"
    dim = 2 * BLOCK

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Returns [texts, 512] of unit length."""
        vectors = np.zeros((len(texts), self.dim), np.float32)
        for row, text in enumerate(texts):
            question, _, rest = text.strip().partition("\n")
            vectors[row, :BLOCK] = _block(_question_features(question))
            vectors[row, BLOCK:] = _block(_newest_features(rest))
        return vectors


def _question_features(line: str) -> Iterator[tuple[str, int]]:
    words = line.lower().split()
    padded = ["", *words, ""]
    yield "line " + " ".join(words), _LINE
    for word in words:
        yield f"word {word}", _WORD
    for three in zip(padded, padded[1:], padded[2:], strict=False):
        yield "three " + " ".join(three), _TRIPLE


def _newest_features(rest: str) -> Iterator[tuple[str, int]]:
    """The words of the last lines weigh most: they are the newest call and its result."""
    words = rest.lower().split()
    if not words:
        yield "no step yet", 1
    for back, word in enumerate(reversed(words[-NUM_NEWEST:])):
        weight = max(1, 8 >> (back // 4))
        yield f"late {word}", weight
        if back + 1 < len(words):
            yield f"late {words[-back - 2]} {word}", weight


def _block(features: Iterator[tuple[str, int]]) -> npt.NDArray[np.float64]:
    total = np.zeros(BLOCK, np.int64)
    for feature, weight in features:
        total += weight * _signs(feature)
    length = np.sqrt(float(total @ total))
    # Features that cancel out leave a vector of nothing; it is as far from everything as can be.
    return total / (length * np.sqrt(2.0)) if length else total.astype(np.float64)


@lru_cache(maxsize=65_536)
def _signs(feature: str) -> npt.NDArray[np.int8]:
    digest = hashlib.blake2b(feature.encode("utf-8", "surrogatepass"), digest_size=BLOCK // 8).digest()
    signs = np.unpackbits(np.frombuffer(digest, np.uint8)).astype(np.int8) * 2 - 1
    signs.flags.writeable = False
    return signs
