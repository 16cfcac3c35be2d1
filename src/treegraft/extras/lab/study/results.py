"""The results of a study: one line a run, added when it ends."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from treegraft import DataError
from treegraft.extras.lab.study.plan import Plan, RunPlan
from treegraft.parts import files, metrics

Line = dict[str, Any]
Key = tuple[str, str, int]

CALLS, REPLAYED = metrics.CALLS
"""Replayed calls, which an environment had to repeat, count as executed."""
TOKENS = "rollout/num_sampled_tokens"
SECONDS = "time/cpu_s"
COSTS = (CALLS, TOKENS, SECONDS)
BY_UPDATE = (CALLS, TOKENS, "learn/entropy", "time/rollout_s", "time/learn_s")
"""Metrics of each update in a line, which its curve lacks."""


def read_results(path: Path) -> list[Line]:
    """Returns the finished runs of a file of results; a last line that a crash cut off is left out.

    Raises:
        DataError: a line that is no run.
    """
    found: list[Line] = []
    number = 0
    try:
        for number, text in files.LineFile(path).lines():  # noqa: B007
            line = json.loads(text)
            # Files of 0.7 and 0.8 also have lines of default settings and of runs that failed.
            # They say nothing of a finished run.
            if "defaults_of" in line or "error" in line:
                continue
            _check(line)
            found.append(line)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        # Of bytes that are no UTF-8, the line before was the last one read.
        number += isinstance(error, UnicodeDecodeError)
        raise DataError(
            f"'{path}', line {number}: not a run of a study ({error!r}); expected an object with"
            " world, method, seed and curve. Remove the line, and the run is made again.",
            code="study-line-invalid",
        ) from error
    return found


def _check(line: Line) -> None:
    line["world"], line["method"], line["seed"]
    # Tables read its first and its last point.
    if not line["curve"]:
        raise ValueError("an empty curve")
    for point in line["curve"]:
        point["update"], point["accuracy"]
        for value in point.values():
            # A text or a list would fail only in the middle of a table.
            float(value)


def known_runs(path: Path, runs: Sequence[RunPlan]) -> tuple[dict[Key, Line], int]:
    """Returns the results of these runs by world, arm and pair, and how many lines the file has of
    finished runs of theirs with other settings."""
    wanted = {(*run.key, run.fingerprint) for run in runs}
    keys = {run.key for run in runs}
    found: dict[Key, Line] = {}
    others = set()
    for line in read_results(path):
        key = key_of(line)
        full = (*key, line.get("fingerprint"))
        if full in wanted:
            found[key] = line
        # Lines of other arms belong to studies that share the file.
        elif key in keys:
            others.add(full)
    return {run.key: found[run.key] for run in runs if run.key in found}, len(others)


def lines_of(plan: Plan, path: Path) -> list[Line]:
    """Returns the finished runs of a study in its order, with the settings in which its runs
    differ: another study that shares the file has named others. Those of removed arms come last,
    with their own."""
    found = known_runs(path, plan.runs)[0]
    lines = []
    for run in plan.runs:
        if run.key in found:
            # The stored settings are those that the study named when the line was written.
            lines.append({**found[run.key], "settings": dict(run.shown)})
    return lines + removed_runs(path, plan.removed)


def removed_runs(path: Path, keys: Collection[Key]) -> list[Line]:
    """Returns the finished runs of arms that a study has no more, with a mark at their names; the
    last line of each key, since the study has no settings for them any more."""
    found: dict[Key, Line] = {}
    for line in read_results(path):
        if key_of(line) in keys:
            found[key_of(line)] = {**line, "method": f"{line['method']} (removed since)"}
    return list(found.values())


def mixed_pairs(lines: Iterable[Line]) -> list[int]:
    """Returns the pairs of these lines, of one world, in which a warm-up ended with several
    weights: with equal seeds it ends as another agent on another kind of processor."""
    weights = defaultdict[Any, set[str]](set)
    for line in lines:
        # Arms with a warm-up of their own begin with other weights on purpose.
        warmup = (line.get("warmup") or {}).get("fingerprint")
        if warmup and line.get("weights"):
            weights[line["seed"], warmup].add(line["weights"])
    # More than one checksum of one warm-up in one pair.
    return sorted({pair for (pair, _), own in weights.items() if len(own) > 1})


def key_of(line: Line) -> Key:
    """Returns the world, arm and pair of a line."""
    return line["world"], line["method"], line["seed"]


def add_results(path: Path, runs: Sequence[RunPlan], found: Line) -> None:
    """Adds a line for each of these runs, which are one and the same in different worlds or under
    different names.

    Args:
        found: the results, with date and machine.
    """
    for run in runs:
        line = {
            "world": run.world,
            "method": run.arm,
            "seed": run.pair,
            "run_seed": run.config.run.seed,
            "warmup_seed": None if run.warmup is None else run.warmup.config.run.seed,
            "fingerprint": run.fingerprint,
            **found,
            "settings": dict(run.shown),
        }
        if run.own.tuning:
            line["tuning"] = run.own.tuning
        files.LineFile(path).append(json.dumps(line, default=str))


_OF_PLAN = (
    "world",
    "method",
    "seed",
    "run_seed",
    "warmup_seed",
    "fingerprint",
    "tuning",
    "settings",
)
"""Keys of a line that say which run of which study it is."""


def repair(path: Path, runs: Sequence[RunPlan]) -> None:
    """Removes a last line that a crash cut off, and adds the lines of runs that are equal to one
    that has its line, also under the name of another study's arm."""
    # Before lines are added, which would continue the cut one.
    files.LineFile(path).drop_cut()
    known = known_runs(path, runs)[0]
    by_fingerprint = {line.get("fingerprint"): line for line in read_results(path)}
    for run in runs:
        if run.key not in known and run.fingerprint in by_fingerprint:
            same = by_fingerprint[run.fingerprint]
            # The results are the same, but world, arm and pair are those of this run.
            own = {name: value for name, value in same.items() if name not in _OF_PLAN}
            add_results(path, [run], own)


def curve(
    lines: Sequence[Mapping[str, float]], warmup: Sequence[Mapping[str, float]] = ()
) -> list[Line]:
    """Returns the accuracy at each evaluation, sampled where that was measured, with the costs so
    far.

    Args:
        lines: of metrics.jsonl; the costs in it are those of each update.
        warmup: of warmup.jsonl, the evaluations during a run's own imitation; they get updates
            below 0, its last step 0.

    Raises:
        DataError: no evaluation.
    """
    points = []
    steps = [line.get("warmup/num_steps", 0.0) for line in warmup]
    for line, step in zip(warmup, steps, strict=True):
        spent = dict.fromkeys(COSTS, 0.0) | {SECONDS: line.get("time/warmup_cpu_s", 0.0)}
        points.append({"update": int(step - steps[-1]), **_measured(line), **spent})
    spent = dict.fromkeys(COSTS, 0.0)
    for line in lines:
        for cost in COSTS:
            spent[cost] += _spent(line, cost)
        if measured := _measured(line):
            # The imitation's last step is update 0, which the run evaluates again.
            if points and points[-1]["update"] == line["update"]:
                points.pop()
            points.append({"update": line["update"], **measured, **spent})
    if not points:
        raise DataError(
            "the run has no evaluation; expected eval.at_end = true, or warmup.eval_every where it"
            " imitates alone.",
            code="no-evaluation",
        )
    return points


def by_update(lines: Sequence[Mapping[str, float]]) -> Line:
    """Returns metrics of updates as columns, "update" first, None if one was not recorded.

    Args:
        lines: of metrics.jsonl; that of update 0 is left out.
    """
    # Update 0 has the evaluation and the imitation before training.
    lines = [line for line in lines if line["update"] > 0]
    columns: Line = {"update": [int(line["update"]) for line in lines]}
    for key in BY_UPDATE:
        column: list[float | None] = []
        for line in lines:
            # Six digits are more than a figure can resolve.
            column.append(float(f"{_spent(line, key):.6g}") if key in line else None)
        if column.count(None) < len(column):
            columns[key] = column
    return columns


def _measured(line: Mapping[str, float]) -> dict[str, float]:
    """The accuracies of a line, the one that curves show first; none without an evaluation."""
    found: dict[str, float] = {}
    for kind in ("eval/accuracy_sampled", "eval/accuracy"):
        if kind in line:
            # The second is the greedy one, if both were measured.
            found[kind if found else "accuracy"] = line[kind]
    if found:
        for key, value in line.items():
            if key.startswith("eval/pass_"):
                found[key] = value
    return found


def _spent(line: Mapping[str, float], cost: str) -> float:
    own = line.get(cost, 0.0)
    if cost == CALLS:
        # An environment had to repeat them for a branch.
        return own + line.get(REPLAYED, 0.0)
    if cost == SECONDS:
        # Imitation before the first update is in the line of update 0.
        return own + line.get("time/warmup_cpu_s", 0.0)
    return own
