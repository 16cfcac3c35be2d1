"""Runs side by side: held-out accuracy by update, and its cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from treegraft.core.errors import DataError
from treegraft.runs.metrics import CALLS
from treegraft.runs.record import RunFolder
from treegraft.view.runs import RunReader

ACCURACIES = ("eval/accuracy_sampled", "eval/accuracy")
COSTS = {
    "rollout/num_tool_calls": "tool calls",
    "rollout/num_sampled_tokens": "sampled tokens",
    "time/cpu_s": "CPU s",
    "time/warmup_s": "warm-up s",
    "time/eval_s": "evaluation s",
}
"""Metrics summed over a run, with their headings. The first three are those of the updates alone,
with the calls that an environment repeated; the last two are wall-clock seconds."""
COSTS_NOTE = (
    "Calls, tokens and CPU seconds are sums over the updates; the warm-up and the evaluations are"
    " not in them. Their wall-clock seconds are the last rows."
)


Row = tuple[str, list[float | None]]
"""Update or cost, with one value for each run; None if it has none."""


def compare_runs(folders: Sequence[Path]) -> tuple[str, list[Row], list[str]]:
    """Returns the accuracy's key, rows, and notes on lines of metrics that were left out, as a
    report leaves them out.

    The first rows are the evaluations, by update; the last ones the metrics of COSTS, summed.

    Raises:
        CheckpointError: one of them is no run folder.
        DataError: one of them has no metrics yet.
    """
    runs = list[list[dict[str, float]]]()
    notes = list[str]()
    for folder in folders:
        run = RunReader(RunFolder.open(folder).path)
        lines, left_out = run.clean_metrics()
        if not lines:
            raise DataError(
                f"run '{folder}' has no line of metrics yet; wait for its first",
                code="no-metrics-yet",
            )
        runs.append(lines)
        notes += [f"{run.name}: {note}" for note in left_out]
    names: set[str] = set()
    for one in runs:
        names = names.union(*one)
    key = ACCURACIES[1] if ACCURACIES[0] not in names and ACCURACIES[1] in names else ACCURACIES[0]
    accuracies = []
    for one in runs:
        accuracies.append({int(line["update"]): line[key] for line in one if key in line})
    rows: list[Row] = []
    for update in sorted(set().union(*accuracies)):
        rows.append((f"update {update}", [values.get(update) for values in accuracies]))
    for cost in COSTS:
        rows.append((cost, [_cost_of(one, cost) for one in runs]))
    return key, rows, notes


def _cost_of(lines: Sequence[Mapping[str, float]], cost: str) -> float | None:
    """The sum of a cost over the lines that have it; None without any."""
    # Calls that an environment repeated for a branch were executed too.
    keys = CALLS if cost in CALLS else (cost,)
    found = None
    for line in lines:
        if cost in line:
            found = (found or 0.0) + sum(line.get(key, 0.0) for key in keys)
    return found
