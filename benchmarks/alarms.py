"""When warnings begin, and when the agent collapses.

python -m benchmarks.alarms [FOLDER] [--quick]

Trains the demo's agent at several learning rates, of which the higher ones ruin it. A run collapses
at the first update at which the mean accuracy of three updates is below half of the best such mean
before it. The table has a row for each warning: in how many of the runs that collapse it begins
before, how many updates before in the median, and in how many of the other runs it begins at all,
which are false alarms. FOLDER keeps the runs, and the same command goes on with those that are
missing.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import NamedTuple

from treegraft import load_config, train
from treegraft.parts import RunReader

RATES = (3e-4, 1e-3, 3e-3, 1e-2)
SEEDS = range(6)
NUM_UPDATES = 24
WINDOW = 3
SHARE = 0.5
PREFIX = "health/"


class Run(NamedTuple):
    """One run: when it collapsed, None for never, and the first update of each warning."""

    rate: float
    seed: int
    collapse: int | None
    first: dict[str, int]


def collapse_of(accuracies: list[float]) -> int | None:
    """Returns the first update, counted from 1, at which the mean of the latest `WINDOW` accuracies
    is below `SHARE` of the best earlier mean; None where there is none."""
    means = [
        statistics.fmean(accuracies[end - WINDOW : end])
        for end in range(WINDOW, len(accuracies) + 1)
    ]
    for place, mean in enumerate(means):
        if place and mean < SHARE * max(means[:place]):
            return place + WINDOW
    return None


def trained(folder: Path, **values: object) -> Path:
    """Trains a run of the demo to its end, from wherever it stands; returns its folder."""
    if folder.exists():
        train(resume=folder, display=False)
        return folder
    values = {
        "run.name": folder.name,
        "run.dir": folder.parent,
        "run.num_threads": 1,
        "eval.every": 0,
        "eval.at_start": "false",
        "eval.at_end": "false",
        **values,
    }
    train(load_config("demo", [f"{key}={value}" for key, value in values.items()]), display=False)
    return folder


def measured(folder: Path, rate: float, seed: int, num_updates: int, num_steps: int) -> Run:
    """Returns a run's warnings; runs of a seed have one warm-up."""
    warm = {"run.seed": seed, "run.num_updates": 0, "warmup.num_steps": num_steps}
    start = RunReader(trained(folder / f"warm-{seed}", **warm)).latest_checkpoint()
    settings = {
        "run.seed": seed,
        "run.num_updates": num_updates,
        "model.path": start,
        "warmup.num_steps": 0,
        "learn.lr": rate,
    }
    reader = RunReader(trained(folder / f"{rate:g}-{seed}", **settings))
    lines = [line for line in reader.clean_metrics()[0] if line["update"] > 0]
    first: dict[str, int] = {}
    for line in lines:
        for key in line:
            if key.startswith(PREFIX):
                first.setdefault(key.removeprefix(PREFIX), int(line["update"]))
    return Run(rate, seed, collapse_of([line["rollout/accuracy"] for line in lines]), first)


def table(runs: list[Run]) -> list[str]:
    """Returns the rows of the table, in Markdown."""
    fallen = [(one, one.collapse) for one in runs if one.collapse is not None]
    others = [one for one in runs if one.collapse is None]
    rows = [
        f"| warning | before a collapse, of {len(fallen)} | updates before, median |"
        f" without a collapse, of {len(others)} |",
        "|---|---|---|---|",
    ]
    for name in sorted({name for one in runs for name in one.first}):
        leads = [at - one.first[name] for one, at in fallen if one.first.get(name, at) < at]
        lead = f"{statistics.median(leads):g}" if leads else "-"
        rows.append(
            f"| {name} | {len(leads)} | {lead} | {sum(name in one.first for one in others)} |"
        )
    return rows


def main() -> None:
    is_quick = "--quick" in sys.argv
    folder = Path(next((one for one in sys.argv[1:] if one != "--quick"), "runs/alarms"))
    sizes = (WINDOW, 10) if is_quick else (NUM_UPDATES, 300)
    runs = []
    for rate in RATES[-1:] if is_quick else RATES:
        for seed in SEEDS[:1] if is_quick else SEEDS:
            runs.append(measured(folder, rate, seed, *sizes))
            print(f"{rate:g}, seed {seed}: {runs[-1].collapse}, {runs[-1].first}", flush=True)
    print("\n".join(table(runs)))


if __name__ == "__main__":
    main()
