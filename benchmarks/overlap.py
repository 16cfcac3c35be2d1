"""How long updates take whose trees grow while earlier ones are learned (`rollout.max_staleness`),
over those in turn. `python -m benchmarks.overlap [--rounds 5]`

The demo's agent learns questions of 1, 3, 4 and 5 searches with GRPO, once with a tool that answers
at once and once with one that takes up to half a second. All ways of a round have the same seed and
the same warm-up, and take turns. All updates count, since trees of the later ones grow during the
first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from treegraft.cli.machine import load_average
from treegraft.core.interfaces import Tool
from treegraft.core.types import Task
from treegraft.settings.tasks import SearchWorldSettings
from treegraft.tasks.search_world import SearchWorld, WorldSearch

ROOT = Path(__file__).resolve().parents[1]
WORLD = SearchWorldSettings(hops=(1, 3, 4, 5))
LONGEST_S = 0.5
"""Longest time of a slow search; each takes another, all equally likely."""
STALENESS = (0, 1, 2)
RUN = (
    *("demo", "run.name=run", "run.dir=.", "run.tasks_per_update=12", "explore.num_leaves=16"),
    *("explore.explorers=['independent']", "tasks.num_eval=4", "warmup.num_steps=40"),
    *("warmup.continue_prob=[0.3]", "eval.every=0", "eval.at_start=false", "eval.at_end=false"),
    *("loss.engine_ratio_cap=2.0", "track.record_trees=false", "health.symptoms_every=0"),
)


class SlowSearch(WorldSearch):
    """The search of the world, which takes its time."""

    luck = random.Random(0)

    async def __call__(self, body: str, task: Task) -> str:
        await asyncio.sleep(self.luck.random() * LONGEST_S)
        return await super().__call__(body, task)


class World(SearchWorld):
    """The search world with `WORLD`'s settings."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(WORLD, **arguments)


class SlowWorld(World):
    """The same with the slow search."""

    def tools(self) -> Sequence[Tool]:
        """Returns the one tool."""
        return (SlowSearch(WORLD, self._train_world.seed),)


TOOLS = {"instant": "benchmarks.overlap:World", "up to .5 s a call": "benchmarks.overlap:SlowWorld"}


class Spent(NamedTuple):
    """What the updates of a run took."""

    seconds: float
    cpu_s: float
    staleness: float
    """Mean of a step, in versions."""


def spent(world: str, max_staleness: int, seed: int, num_updates: int) -> Spent:
    """Trains in a process of one thread and returns what its updates took."""
    with tempfile.TemporaryDirectory() as folder:
        told = [
            f"tasks.kind={world}",
            f"rollout.max_staleness={max_staleness}",
            f"run.seed={seed}",
            f"run.num_updates={num_updates}",
        ]
        command = [sys.executable, "-m", "treegraft", "train", *RUN, *told]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["update"] > 0]
    stale = [row.get("rollout/staleness_mean", 0.0) for row in rows]
    return Spent(
        sum(row["time/update_s"] for row in rows),
        sum(row["time/cpu_s"] for row in rows),
        sum(stale) / len(stale),
    )


def measured(
    rounds: int, num_updates: int, tools: Sequence[str]
) -> dict[str, dict[int, list[Spent]]]:
    """Returns for each kind of tool and each staleness what the rounds took, in their order."""
    found: dict[str, dict[int, list[Spent]]] = {
        name: {staleness: [] for staleness in STALENESS} for name in tools
    }
    for number in range(rounds):
        for name in tools:
            turned = STALENESS if number % 2 == 0 else STALENESS[::-1]
            for staleness in turned:
                one = spent(TOOLS[name], staleness, number, num_updates)
                found[name][staleness].append(one)
                print(f"round {number}, {name}, staleness {staleness}: {one.seconds:.1f} s")
    return found


def table(found: dict[str, dict[int, list[Spent]]]) -> Iterator[str]:
    """Yields the lines of a Markdown table."""
    yield "| tools | `max_staleness` | seconds | CPU seconds | mean staleness of a step |"
    yield "|---|---:|---|---|---:|"
    for name, ways in found.items():
        for staleness in STALENESS[1:]:
            own, first = ways[staleness], ways[0]
            seconds = _ratios([one.seconds for one in first], [one.seconds for one in own])
            cpu = _ratios([one.cpu_s for one in first], [one.cpu_s for one in own])
            mean = median(one.staleness for one in own)
            yield f"| {name} | {staleness} | {seconds} | {cpu} | {mean:.2f} |"


def _ratios(first: Sequence[float], other: Sequence[float]) -> str:
    """The ratio of medians, and the least and greatest of a round."""
    each = [b / a for a, b in zip(first, other, strict=True)]
    return f"{median(other) / median(first):.2f} ({min(each):.2f} to {max(each):.2f})"


def main() -> None:
    """Prints each run's seconds and the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each way")
    parser.add_argument("--updates", type=int, default=9, help="of each run")
    parser.add_argument("--only", choices=list(TOOLS), help="one kind of tool")
    options = parser.parse_args()
    before = load_average()
    found = measured(options.rounds, options.updates, [options.only] if options.only else [*TOOLS])
    size = f"{options.rounds} rounds of {options.updates} updates"
    print(f"\n{size}; load {before} to {load_average()}; over those in turn:\n")
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
