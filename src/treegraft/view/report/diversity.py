"""Semantic diversity of trajectories: embeddings, their first two principal components, clusters by
DBSCAN.

Sets that are compared have equal numbers of trajectories, since more points make more clusters.
DBSCAN (Ester, Kriegel, Sander & Xu, KDD 1996) runs on each set by itself, on cosine distances, with
`MIN_SAMPLES` and one radius for all of them, found as its authors propose (sec. 4.2) from the
distances to the neighbour that makes a core point: their median, so that half of all are core
points.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from treegraft.tools.search.encoders import Encoder, build_encoder
from treegraft.view.report.trees import Seen

MOST_EACH = 200
"""Trajectories of a kind (on-policy or hybrid) that are embedded, of each phase of a run."""
MIN_SAMPLES = 3
PHASES = ("first third", "second third", "last third")
_Matrix = npt.NDArray[np.float32]


class Reservoir:
    """An even sample of what passes by, of a size fixed ahead (Vitter's algorithm R); the same for
    the same stream."""

    def __init__(self, size: int = MOST_EACH) -> None:
        self.items: list[Seen] = []
        self.num_seen = 0
        self._size, self._random = size, random.Random(0)

    def add(self, item: Seen) -> None:
        """Takes an item in, or not."""
        self.num_seen += 1
        if len(self.items) < self._size:
            self.items.append(item)
        elif (place := self._random.randrange(self.num_seen)) < self._size:
            self.items[place] = item


@dataclass(frozen=True, slots=True)
class Clusters:
    """How many ways of acting: Clusters(num=50, clusters=7, noise=0.1, distance=0.4,
    within=0.05)"""

    num: int
    """Trajectories."""
    clusters: int
    noise: float
    """Share of trajectories in no cluster, 0..1."""
    distance: float
    """Mean cosine distance of two trajectories, 0..2."""
    within: float | None
    """The same of two of one tree, so of one task; None: no two are."""


def phase_of(update: int, num_updates: int) -> int:
    """Returns 0, 1 or 2: the third of a run's updates (1 .. num_updates) that this one is in."""
    return min(2, 3 * (update - 1) // max(1, num_updates))


def choose_encoder(name: str) -> tuple[Encoder, str]:
    """Returns an encoder and a line on it. Raises SettingError, ModelError: as `build_encoder`."""
    encoder = build_encoder(name)
    about = {
        "hashing": "hashed words and triples of words (no model)",
        "minilm": "all-MiniLM-L6-v2",
    }
    return encoder, about.get(encoder.name, encoder.name)


def embed(encoder: Encoder, texts: Sequence[str]) -> _Matrix:
    """Returns [texts, dim] of unit length; an empty text is a vector like others."""
    vectors = encoder.encode(texts)
    if encoder.name == "hashing":
        # Its second half is about the newest step of a history; trajectories are one line each, and
        # have none.
        vectors = vectors[:, : vectors.shape[1] // 2] * np.float32(np.sqrt(2.0))
    return vectors


def distances(vectors: _Matrix) -> _Matrix:
    """Returns [n, n] cosine distances, 0..2, exactly 0 on the diagonal."""
    found: _Matrix = np.clip(1 - vectors @ vectors.T, 0, 2).astype(np.float32)
    np.fill_diagonal(found, 0)
    return found


def radius_of(vectors: Sequence[_Matrix]) -> float:
    """Returns the median over all trajectories of the distance to the neighbour of its set that
    makes it a core point."""
    nearest = [
        np.sort(distances(one), axis=1)[:, MIN_SAMPLES - 1]
        for one in vectors
        if len(one) >= MIN_SAMPLES
    ]
    return float(np.median(np.concatenate(nearest))) if nearest else 0.0


def count(vectors: _Matrix, trees: Sequence[str], radius: float) -> Clusters:
    """Returns the clusters of some trajectories, neighbours being at most `radius` apart; `trees`
    says what each is of."""
    from sklearn.cluster import DBSCAN

    matrix = distances(vectors)
    # Rounding keeps equal texts a little apart.
    labels = DBSCAN(
        eps=max(radius, 1e-5), min_samples=MIN_SAMPLES, metric="precomputed"
    ).fit_predict(matrix)
    first, second = np.triu_indices(len(vectors), 1)
    of = np.unique(np.asarray(trees), return_inverse=True)[1]
    pairs, shared = matrix[first, second], of[first] == of[second]
    return Clusters(
        num=len(vectors),
        clusters=len(set(labels.tolist()) - {-1}),
        noise=float(np.mean(labels == -1)),
        distance=float(pairs.mean()) if len(pairs) else 0.0,
        within=float(pairs[shared].mean()) if shared.any() else None,
    )


def project(
    sets: Mapping[str, _Matrix],
) -> tuple[dict[str, npt.NDArray[np.float64]], tuple[float, float]]:
    """Returns the first two principal components of all sets together, and their shares of the
    variance."""
    from sklearn.decomposition import PCA

    together = np.concatenate(list(sets.values())).astype(np.float64)
    if len(together) < 2 or float(together.var(axis=0).sum()) < 1e-12:
        return {name: np.zeros((len(one), 2)) for name, one in sets.items()}, (0.0, 0.0)
    model = PCA(n_components=2, svd_solver="full").fit(together)
    shares = model.explained_variance_ratio_
    return {name: model.transform(one.astype(np.float64)) for name, one in sets.items()}, (
        float(shares[0]),
        float(shares[1]),
    )
