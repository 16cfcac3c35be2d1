"""The viewer of a run with 500 updates of 32 trees with 16 leaves: what its server holds in memory.

How long it takes to open is measured and printed, never asserted.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from tests.support.viewed import metrics_of, plain_tree, repeat_update, step

from treegraft.core.types import (
    ContinuationCause,
    Leaf,
    Observation,
    StartCause,
    Status,
    StepContent,
    ToolCall,
    Tree,
)
from treegraft.runs.record import RunFolder
from treegraft.runs.tree_files import write_trees
from treegraft.view.runs import RunReader

MOST_MB = 300
"""What the server may take."""
UPDATES = 500
TREES = 32
LEAVES = 16


def wide_tree(number: int) -> Tree:
    """Returns a tree of 16 starts of three steps, some 700 tokens."""
    base = plain_tree(1, f"t/{number}")
    seen = StepContent(
        calls=(ToolCall("search", "e1 r1"),), observations=(Observation(text="r1 of e1 is e2"),)
    )
    steps = [base.root]
    leaves = []
    for n in range(LEAVES):
        steps.append(step(f"0.{n}", "ssssttttttt", seen, StartCause()))
        steps.append(step(f"0.{n}.0", "ssssttttttt", seen, ContinuationCause()))
        steps.append(
            step(
                f"0.{n}.0.0",
                "ssssssssssssssssssssss",
                StepContent(answer="e2"),
                ContinuationCause(),
            )
        )
        leaves.append(
            Leaf(
                step_id=f"0.{n}.0.0",
                status=Status.COMPLETED,
                reward=float(n % 2),
                advantage=0.5,
                weight=1 / LEAVES,
            )
        )
    return replace(base, steps=tuple(steps), leaves=tuple(leaves))


def write_large_run(path: Path) -> Path:
    """Returns the run folder."""
    folder = RunFolder.create(path, json.dumps({"run": {"num_updates": UPDATES}}))
    write_trees(folder.trees_path(1), [wide_tree(n) for n in range(TREES)])
    repeat_update(path, UPDATES)
    lines = [{"update": update, **metrics_of(update)} for update in range(1, UPDATES + 1)]
    folder.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_list_of_runs_reads_no_trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for again and again, and a run may hold ten thousand heads."""
    folder = RunFolder.create(tmp_path / "run", json.dumps({"run": {"num_updates": 2}}))
    write_trees(folder.trees_path(1), [wide_tree(0)])
    monkeypatch.setattr("treegraft.view.runs.parse_tree", None)
    reader = RunReader(folder.path)
    first = reader.state()["newest"]
    path = folder.path / "trees"
    assert first == path.stat().st_mtime_ns
    # What was written since is noticed.
    os.utime(path, ns=(first, first + 10**9))
    assert reader.state()["newest"] == first + 10**9


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="memory is read from /proc, which only Linux has"
)
def test_a_large_run_stays_small_in_memory(tmp_path: Path) -> None:
    path = write_large_run(tmp_path / "large")
    command = [sys.executable, "-m", "treegraft", "view", str(path), "--port", "0", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found is not None
            api = f"{found[0]}api/runs"
            opened = {}
            for page in (
                "",
                "/large/metrics",
                "/large",
                "/large/groups?file=update-000250",
                "/large/trees/update-000250/31",
            ):
                began = time.perf_counter()
                assert httpx.get(f"{api}{page}", timeout=120).status_code == 200
                opened[page] = round(time.perf_counter() - began, 3)
            status = Path(f"/proc/{process.pid}/status").read_text()
            most = int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)
        finally:
            process.kill()
    size = sum(file.stat().st_size for file in (path / "trees").iterdir()) / 1e6
    print(f"seconds: {opened}; largest memory {most:.0f} MB; all trees {size:.1f} MB")
    assert most < MOST_MB
