"""Runs side by side: held-out accuracy by update, and its cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from treegraft.runs.record import RunFolder, read_metrics

ACCURACIES = ("eval/accuracy_sampled", "eval/accuracy")
COSTS = ("rollout/num_tool_calls", "rollout/num_sampled_tokens", "time/cpu_s")
"""Summed over the updates."""


def compare_runs(folders: Sequence[Path]) -> tuple[str, list[tuple[str, list[float | None]]]]:
    """Returns the accuracy's key, and rows (update or cost, one value for each run; None where it
    has none).

    The first rows are the evaluations, by update; the last ones the costs of all updates together.

    Raises:
        CheckpointError: one of them is no run folder.
        DataError: one of them has no metrics yet.
    """
    runs = [read_metrics(RunFolder.open(folder).path) for folder in folders]
    key = next(
        (key for key in ACCURACIES if any(key in line for run in runs for line in run)),
        ACCURACIES[0],
    )
    accuracies = [{int(line["update"]): line[key] for line in run if key in line} for run in runs]
    updates = sorted({update for one in accuracies for update in one})
    rows: list[tuple[str, list[float | None]]]
    rows = [(f"update {update}", [one.get(update) for one in accuracies]) for update in updates]
    for cost in COSTS:
        rows.append((cost, [sum(line.get(cost, 0.0) for line in run) for run in runs]))
    return key, rows
