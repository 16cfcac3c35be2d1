"""Semantic diversity of runs: DBSCAN clusters of the embeddings of their trajectories.

python examples/diversity.py runs/first runs/grafted
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence

import numpy as np
from sklearn.cluster import DBSCAN

from treegraft import Trajectory, read_trees
from treegraft.parts import GraftCause, build_encoder

MIN_SAMPLES = 3
MOST = 200


def text_of(path: Trajectory) -> str:
    """Returns thoughts, calls, results and answer on one line; the question is left out."""
    words = []
    for said in path.contents:
        words += [said.thought, *(f"{call.name} {call.body}" for call in said.calls)]
        words += [*(seen.text for seen in said.observations), said.answer or ""]
    return " ".join(" ".join(words).split())


def distances(vectors: np.ndarray) -> np.ndarray:
    """Returns [n, n] cosine distances of unit vectors, 0..2."""
    return np.asarray(np.clip(1 - vectors @ vectors.T, 0, 2))


def radius_of(matrices: Sequence[np.ndarray]) -> float:
    """Returns the median distance to the neighbour that makes a core point: half of all are."""
    return float(np.median([np.sort(matrix)[:, MIN_SAMPLES - 1] for matrix in matrices]))


def clusters(matrix: np.ndarray, radius: float) -> tuple[int, float]:
    """Returns the number of clusters, and the share of trajectories in none."""
    model = DBSCAN(eps=max(radius, 1e-5), min_samples=MIN_SAMPLES, metric="precomputed")
    labels = model.fit_predict(matrix)
    return len({*labels} - {-1}), float(np.mean(labels == -1))


if __name__ == "__main__":
    sets: dict[str, list[str]] = {}
    for run in sys.argv[1:]:
        for path in (path for tree in read_trees(run) for path in tree.trajectories()):
            grafts = [step for step in path.steps if isinstance(step.cause, GraftCause)]
            name = f"{run} {'hybrid' if grafts else 'on-policy'}"
            sets.setdefault(name, []).append(text_of(path))
    num = min(MOST, *map(len, sets.values()))
    encoder = build_encoder("hashing")
    chosen = {name: random.Random(0).sample(texts, num) for name, texts in sets.items()}
    found = {name: distances(encoder.encode(texts)) for name, texts in chosen.items()}
    for name, matrix in found.items():
        number, noise = clusters(matrix, radius_of(list(found.values())))
        print(f"{name}: {num} trajectories, {number} clusters, {noise:.0%} in none")
