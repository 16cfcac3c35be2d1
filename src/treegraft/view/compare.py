"""Runs side by side: held-out accuracy by update, and its cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    updates = sorted({int(line["update"]) for run in runs for line in run if key in line})
    rows = [(f"update {update}", [_at(run, update, key) for run in runs]) for update in updates]
    for cost in COSTS:
        rows.append((cost, [sum(line.get(cost, 0.0) for line in run) for run in runs]))
    return key, rows


def _at(run: Sequence[Mapping[str, float]], update: int, key: str) -> float | None:
    return next((line[key] for line in run if line["update"] == update and key in line), None)
