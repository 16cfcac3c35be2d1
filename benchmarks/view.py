"""The viewer's answers on a run of many updates: seconds and bytes of each.

    python -m benchmarks.view [--updates 10000] [--keep FOLDER]

The run is made of copies of one update's trees, and of lines of metrics as a run
with grafts, branches and two tools writes them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from starlette.datastructures import QueryParams
from tests.support.viewed import repeat_update, write_run

from treegraft.runs.metrics import METRICS
from treegraft.view.runs import open_runs
from treegraft.view.server import Api

NUM_KEYS = 90
"""Metrics of one line, of those that there are."""


def make_run(folder: Path, num_updates: int) -> Path:
    """Returns a run folder with the trees and metrics of so many updates."""
    path = write_run(folder / "run", num_updates=1)
    repeat_update(path, num_updates)
    keys = [key for key in METRICS if "{" not in key][:NUM_KEYS]
    with (path / "metrics.jsonl").open("w") as file:
        for number in range(1, num_updates + 1):
            own = dict.fromkeys(keys, number * 7919 % 1000 / 7)
            file.write(json.dumps({**own, "update": number}) + "\n")
    return path


def request(query: str = "", **path: Any) -> Any:
    """Returns what an answer reads of a request."""
    return SimpleNamespace(path_params={"run": "run", **path}, query_params=QueryParams(query))


def answers(path: Path) -> dict[str, Callable[[], Any]]:
    """Returns the viewer's answers about a run, each as a function."""
    api = Api(open_runs([path]))
    return {
        "list of runs": lambda: api.runs(request()),
        "a run": lambda: api.run(request()),
        "metrics": lambda: api.metrics(request()),
        "trees of an update": lambda: api.groups(request("file=update-000001")),
        "one tree": lambda: api.tree(request(file="update-000001", n="0")),
        "tokens of a leaf": lambda: api.tokens(request(file="update-000001", n="0")),
    }


def measured(path: Path) -> list[tuple[str, float, int]]:
    """Returns (name, seconds, bytes of JSON, compressed as browsers get it) of each answer."""
    rows = []
    for name, answer in answers(path).items():
        began = time.perf_counter()
        data = json.dumps(answer()).encode()
        rows.append((name, time.perf_counter() - began, len(gzip.compress(data, 1))))
    return rows


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=10_000)
    parser.add_argument("--keep", type=Path, help="make the run here, or take the one that is here")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = asked.keep or Path(folder)
        path = home / "run"
        if not path.exists():
            make_run(home, asked.updates)
        print(f"{asked.updates:,} updates")
        for name, seconds, size in measured(path):
            print(f"{name:<36}{seconds:8.3f} s {size / 1000:10.1f} kB")


if __name__ == "__main__":
    main()
