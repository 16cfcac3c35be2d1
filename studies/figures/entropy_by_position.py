"""Entropy by position: how unsure the policy is at the first, second, ... token that it samples
after the prompt and after a tool's result.

    python studies/figures/entropy_by_position.py RUN [FILE.svg]

ARPO's preliminary experiment (arXiv 2507.19849, sec. 2.2) on the recorded trees of a run: prints
means over steps with 95 % intervals over trees, and draws them into the run's folder.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure
from scipy import stats

from treegraft import Step, Tree, read_trees
from treegraft.parts import BranchCause, GraftCause, RestartCause, RetryCause, StoredCause

MOST_POSITIONS = 50
"""Tokens of a step that are looked at: the span of the paper's experiment."""
PROMPT = "the prompt"
OTHERS = BranchCause | GraftCause | RestartCause | RetryCause | StoredCause | None
"""Causes of steps that do not show the policy by itself."""


def live_steps(tree: Tree) -> Iterator[tuple[Step, str]]:
    """Yields the steps that show the policy by itself, and what stands before each: the prompt, or
    the names of the tools whose results it follows.

    Left out are grafts, stored steps, branches, steps with a forced opening, and everything below
    them: a branch stands where entropy was high, and the step it branched from has been counted.
    """
    live = {tree.root.id}
    above = {step.id: step for step in tree.steps}
    for step in tree.steps[1:]:
        parent = above[str(step.parent)]
        is_own = not isinstance(step.cause, OTHERS)
        if not is_own or parent.id not in live or not step.sampled_mask[:1].any():
            continue
        live.add(step.id)
        calls = parent.content.calls[: len(parent.content.observations)]
        after = " + ".join(dict.fromkeys(call.name for call in calls))
        if parent is tree.root or after:
            yield step, after or PROMPT


class Point(NamedTuple):
    """The entropy at a position, counted from 1."""

    position: int
    num_steps: int
    num_trees: int
    mean: float
    """Nats, over steps."""
    half: float
    """Half of the 95 % interval over trees; 0 for a single tree."""


def mean_over_trees(position: int, trees: list[list[float]]) -> Point:
    """Returns the mean over steps of the entropies of several trees.

    m = Σ S_i / Σ n_i,  m ± t(k-1, 0.975) √(k/(k-1) Σ (S_i - m n_i)²) / Σ n_i  over k trees

    The variance of a ratio (W. G. Cochran, "Sampling techniques", 1977, sec. 6.3): steps of one
    tree share their question, so they are no independent observations.
    """
    k = len(trees)
    count = sum(map(len, trees))
    mean = sum(map(math.fsum, trees)) / count
    half = 0.0
    if k > 1:
        spread = sum((math.fsum(own) - mean * len(own)) ** 2 for own in trees)
        error = math.sqrt(k / (k - 1) * spread) / count
        half = float(stats.t.ppf(0.975, k - 1)) * error
    return Point(position, count, k, mean, half)


def entropies(trees: list[Tree]) -> dict[str, list[Point]]:
    """Returns the points of each kind of step, by what stands before it, the prompt first."""
    found: dict[tuple[str, int], list[list[float]]] = defaultdict(list)
    for tree in trees:
        own: dict[tuple[str, int], list[float]] = defaultdict(list)
        for step, after in live_steps(tree):
            for place, entropy in enumerate(step.sampled_entropies[:MOST_POSITIONS], start=1):
                own[after, place].append(float(entropy))
        for key, values in own.items():
            found[key].append(values)
    curves: dict[str, list[Point]] = defaultdict(list)
    for after, place in sorted(found, key=lambda key: (key[0] != PROMPT, key)):
        curves[after].append(mean_over_trees(place, found[after, place]))
    return curves


def main(run: str, out: str = "") -> None:
    """Prints and draws the entropies of a run."""
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    print("after, position, steps, trees, mean, low, high")
    for after, points in entropies(read_trees(run)).items():
        means = [point.mean for point in points]
        places = [point.position for point in points]
        axes.errorbar(places, means, [point.half for point in points], label=f"after {after}")
        for point in points:
            bounds = f"{point.mean - point.half:.3f}, {point.mean + point.half:.3f}"
            counts = f"{point.position}, {point.num_steps}, {point.num_trees}"
            print(f"{after}, {counts}, {point.mean:.3f}, {bounds}")
    axes.set_xlabel("position in the step (token)")
    axes.set_ylabel("entropy (nats)")
    axes.legend()
    place = Path(out or Path(run) / "entropy-by-position.svg")
    figure.savefig(place)
    print(place)


if __name__ == "__main__":
    main(*sys.argv[1:])
