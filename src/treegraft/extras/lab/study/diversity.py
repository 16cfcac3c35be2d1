"""How far the rollouts of a task lie apart, from the trees that a run recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from treegraft import Trajectory, Tree
from treegraft.parts import RunReader, build_encoder

DISTANCE = "diversity/distance"


def distances(run: RunReader, encoder: str = "hashing") -> Mapping[int, dict[str, float]]:
    """Returns by update the mean over its trees of `distance`; updates without trees are left
    out."""
    made = build_encoder(encoder)
    found: dict[int, dict[str, float]] = {}
    for file in run.files():
        if file.kind == "update":
            trees = (run.tree(file.name, number) for number in range(run.num_trees(file.name)))
            own = [one for tree in trees if (one := distance(tree, made)) is not None]
            if own:
                found[file.update] = {DISTANCE: fmean(own)}
    return found


def distance(tree: Tree, encoder: Any) -> float | None:
    """Returns the mean cosine distance between two trajectories of a tree, 0..2; None where fewer
    than two have said anything.

    1 - mean_{i<j} v_i · v_j

    with v the unit vectors of their texts. RAPO (arXiv 2603.03078, figure 4) counts clusters of
    such vectors in place of it, with a radius of its own choice.
    """
    texts = [text for path in tree.trajectories() if (text := text_of(path))]
    if len(texts) < 2:
        return None
    vectors = np.asarray(encoder.encode(texts), np.float64)
    num, whole = len(texts), vectors.sum(axis=0)
    # The sum over all pairs, each twice, without those of a vector and itself.
    likeness = float(whole @ whole - (vectors * vectors).sum())
    return 1.0 - likeness / (num * (num - 1))


def text_of(path: Trajectory) -> str:
    """Returns thoughts, calls, results and answer of a trajectory on one line, without the
    question."""
    words: Sequence[str] = [
        part
        for said in path.contents
        for part in (
            said.thought,
            *(f"{call.name} {call.body}" for call in said.calls),
            *(seen.text for seen in said.observations),
            said.answer or "",
        )
    ]
    return " ".join(" ".join(words).split())
