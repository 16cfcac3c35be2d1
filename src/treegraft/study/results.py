"""The results of a study: one line a run, added when it ends."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from treegraft.core.errors import DataError
from treegraft.core.files import append_line, drop_cut_line, parse_json, whole_lines
from treegraft.study.plan import RunPlan

Line = dict[str, Any]
Key = tuple[str, str, int]


def read_results(path: Path) -> list[Line]:
    """Returns the lines of a file of results; a last one that a crash cut off is left out.

    Raises:
        DataError: a line that holds no run.
    """
    found: list[Line] = []
    for number, text in whole_lines(path):
        try:
            line = parse_json(text)
            line["world"], line["method"], line["seed"], line["curve"][-1]["accuracy"]
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise DataError(
                f"'{path}', line {number}: not a run of a study ({error!r}); expected an object"
                " with world, method, seed and curve. Remove the line, and the run is made again."
            ) from error
        found.append(line)
    return found


def known_runs(path: Path, runs: Sequence[RunPlan]) -> tuple[dict[Key, Line], int]:
    """Returns the results of these runs by world, arm and pair, and how many lines the file has of
    runs with other settings."""
    lines = read_results(path)
    by_key = {(*key_of(line), line.get("fingerprint")): line for line in lines}
    found = {
        run.key: by_key[*run.key, run.fingerprint]
        for run in runs
        if (*run.key, run.fingerprint) in by_key
    }
    wanted = {run.fingerprint for run in runs}
    return found, sum(line.get("fingerprint") not in wanted for line in lines)


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
            **({"tuning": dict(run.tuning)} if any(run.tuning.values()) else {}),
            "settings": dict(run.shown),
        }
        append_line(path, json.dumps(line, default=str))


def repair(path: Path, runs: Sequence[RunPlan]) -> None:
    """Removes a last line that a crash cut off, and adds the lines of runs that are equal to one
    that has its line."""
    drop_cut_line(path)
    known = known_runs(path, runs)[0]
    by_fingerprint = {line["fingerprint"]: line for line in known.values()}
    for run in runs:
        if run.key not in known and run.fingerprint in by_fingerprint:
            add_results(path, [run], _without_own(by_fingerprint[run.fingerprint]))


def _without_own(line: Line) -> Line:
    own = (
        "world",
        "method",
        "seed",
        "run_seed",
        "warmup_seed",
        "fingerprint",
        "tuning",
        "settings",
    )
    return {name: value for name, value in line.items() if name not in own}
