"""What the development runs of a study chose for each arm, and what they cost.

python -m benchmarks.tuning [--json]

Each world of studies/tuning.toml is one setting that is tried; the first is the one an arm keeps
unless another is better by more than .01, in the mean accuracy at 4,000 executed calls over the
study's pairs (studies/PROTOCOL.md).
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from treegraft.extras.lab.study.plan import make_plan
from treegraft.extras.lab.study.results import CALLS, SECONDS, key_of, known_runs, removed_runs
from treegraft.extras.statistics import accuracy_at

STUDY = Path(__file__).resolve().parents[1] / "studies" / "tuning.toml"
BUDGET = 4000
TIE = 0.01


class Tuned(NamedTuple):
    """An arm's means at the budget by setting, the setting that it takes, and what its runs
    cost."""

    accuracies: dict[str, float]
    chosen: str
    num_runs: int
    calls: float
    cpu_s: float


def chosen_of(accuracies: dict[str, float]) -> str:
    """Returns the setting with the highest mean; the first one where it is within the tie."""
    first = next(iter(accuracies))
    best = max(accuracies, key=accuracies.__getitem__)
    return best if accuracies[best] > accuracies[first] + TIE else first


def tuned(study: Path = STUDY) -> dict[str, Tuned]:
    """Returns what was chosen for each arm of which all runs are there."""
    plan = make_plan(study)
    results = study.with_suffix(".jsonl")
    lines = known_runs(results, plan.runs)[0]
    gone = {key_of(line): line for line in removed_runs(results, plan.removed)}
    lines |= gone
    planned = defaultdict[str, list[tuple[str, str, int]]](list)
    for key in [*(run.key for run in plan.runs), *gone]:
        planned[key[1]].append(key)
    found = {}
    for arm, keys in planned.items():
        if not all(key in lines for key in keys):
            continue
        reached = defaultdict[str, list[float]](list)
        ends = []
        for key in keys:
            curve = lines[key]["curve"]
            costs = [one[CALLS] for one in curve]
            values = [one["accuracy"] for one in curve]
            at = accuracy_at(costs, values, BUDGET)
            if at is None:
                raise SystemExit(f"{arm}, {key[0]}, pair {key[2]} ended before {BUDGET} calls")
            reached[key[0]].append(at)
            ends.append(curve[-1])
        means = {world: statistics.fmean(values) for world, values in reached.items()}
        found[arm] = Tuned(
            means,
            chosen_of(means),
            len(keys),
            sum(end[CALLS] for end in ends),
            sum(end[SECONDS] for end in ends),
        )
    return found


def main() -> None:
    """Prints the table, or with --json the same data."""
    found = tuned()
    if not found:
        raise SystemExit(f"no arm of {STUDY} has all of its runs; run: treegraft study {STUDY}")
    if "--json" in sys.argv[1:]:
        print(json.dumps({arm: one._asdict() for arm, one in found.items()}))
        return
    worlds = list(next(iter(found.values())).accuracies)
    print(f"| arm | {' | '.join(worlds)} | chosen | runs | calls | CPU s |")
    print("|---" * (len(worlds) + 5) + "|")
    for arm, one in found.items():
        cells = " | ".join(f"{one.accuracies[world]:.2f}" for world in worlds)
        cost = f"{one.num_runs} | {one.calls:,.0f} | {one.cpu_s:,.0f}"
        print(f"| {arm} | {cells} | {one.chosen} | {cost} |")


if __name__ == "__main__":
    main()
