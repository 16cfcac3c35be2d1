"""The table of README's results, from the recorded lines of two studies.

python -m benchmarks.readme
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from treegraft.extras.lab.study.file import read_study
from treegraft.extras.lab.study.plan import make_plan
from treegraft.extras.lab.study.results import known_runs

STUDIES = Path(__file__).resolve().parents[1] / "studies"
CALLS = "rollout/num_tool_calls"
WORLDS = {"stops early": ("decisive.toml", "imperfect"), "unsure": ("arpo-fair.toml", "unsure")}
"""Heading -> study and world."""


class End(NamedTuple):
    """What an arm has after the last update: means over pairs."""

    accuracy: float
    calls: float
    experts: float
    """Tool calls that the expert's trajectories took."""


class Row(NamedTuple):
    """One method, and the name of its arm in the studies."""

    title: str
    arm: str


ROWS = (
    Row("GRPO", "GRPO"),
    Row("[ARPO](docs/arpo.md)", "ARPO"),
    Row("Tree-GRPO", "Tree-GRPO"),
    Row("[RAPO](docs/rapo.md)", "RAPO"),
    Row("imitation of the expert as it is", "SFT, raw"),
    Row("imitation of the [pruned](docs/buffer.md#pruning) expert", "SFT, pruned"),
    Row("[commit branching](docs/methods.md#commit-branching), ours", "commit"),
)


def measured(study: str, world: str) -> dict[str, End]:
    """Returns where each arm ends, by its name."""
    path = STUDIES / study
    arms = [row.arm for row in ROWS if row.arm in read_study(path).arms]
    plan = make_plan(path, only=[world, *arms])
    results = STUDIES / (plan.study.results or f"{path.stem}.jsonl")
    lines = known_runs(results, plan.runs)[0]
    found = {}
    for arm in arms:
        own = [line for (_, one, _), line in lines.items() if one == arm]
        if own:
            found[arm] = End(
                statistics.fmean(line["curve"][-1]["accuracy"] for line in own),
                statistics.fmean(line["curve"][-1][CALLS] for line in own),
                statistics.fmean((line.get("buffer") or {}).get("calls", 0) for line in own),
            )
    return found


def table() -> Iterator[str]:
    """Yields the lines of the table."""
    worlds = [measured(*place) for place in WORLDS.values()]
    heads = [cell for name in WORLDS for cell in (name, "its calls")]
    yield f"| method | {' | '.join(heads)} | expert's calls |"
    yield "|---" * (2 + len(heads)) + "|"
    for row in ROWS:
        cells, experts = [row.title], 0.0
        for world in worlds:
            end = world.get(row.arm)
            cells += [f"{end.accuracy:.2f}", f"{end.calls:,.0f}"] if end else ["", ""]
            experts = max(experts, end.experts if end else 0)
        yield f"| {' | '.join(cells)} | {experts:,.0f} |"


if __name__ == "__main__":
    print("\n".join(table()))
