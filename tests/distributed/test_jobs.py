"""`torchrun -m treegraft train`: one rank after another is started, killed, stopped."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.distributed.jobs import DEADLINE_S, children, torchrun

from treegraft import train

SMALL = (
    *("warmup.num_steps=6", "tasks.num_train=40", "tasks.num_eval=4", "eval.every=0"),
    *("run.tasks_per_update=4", "explore.num_leaves=4", "learn.max_pack_tokens=400"),
    *("checkpoint.every=1", "run.name=run", "run.dir=."),
)


@contextmanager
def job(tmp_path: Path, *arguments: str) -> Iterator[tuple[int, list[int], Iterator[str]]]:
    """Holds a job of two ranks: torchrun's process, the ranks', the lines that it prints."""
    process = torchrun(2, "-m", "treegraft", "train", *arguments, cwd=tmp_path)
    assert process.stdout is not None
    deadline = time.monotonic() + DEADLINE_S
    ranks: list[int] = []
    try:
        while len(ranks) < 2:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.2)
            ranks = children(process.pid)
        yield process.pid, ranks, iter(process.stdout)
    finally:
        process.terminate()
        process.wait(DEADLINE_S)
        process.stdout.close()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def updates(folder: Path) -> list[int]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["update"] for line in lines]


def test_a_killed_rank_ends_the_job_and_fewer_ranks_go_on(tmp_path: Path) -> None:
    with job(tmp_path, "demo", "run.num_updates=500", *SMALL) as (_, ranks, lines):
        next(line for line in lines if line.startswith("update 2/"))
        began = time.monotonic()
        os.kill(ranks[1], signal.SIGKILL)
        error = next(line for line in lines if line.startswith("error: "))
        list(lines)
        assert time.monotonic() - began < 15.0
        said = rf"rank 1 \(\S+, process {ranks[1]}\) has ended: no last words; it was at '\w+'"
        assert re.search(said, error) and "--resume" in error
        deadline = time.monotonic() + 10.0
        while any(map(is_alive, ranks)):
            assert time.monotonic() < deadline
            time.sleep(0.2)
    done = max(updates(tmp_path / "run"))
    settings = json.loads((tmp_path / "run" / "config.json").read_text(encoding="utf-8"))
    settings["run"]["num_updates"] = done + 1
    result = train(settings, resume=tmp_path / "run", display=False)
    assert result.metrics["policy_version"] == done + 1
    assert updates(tmp_path / "run") == list(range(done + 2))


@pytest.mark.slow
def test_a_stopped_job_saves_and_goes_on(tmp_path: Path) -> None:
    with job(tmp_path, "demo", "run.num_updates=500", *SMALL) as (launcher, ranks, lines):
        next(line for line in lines if line.startswith("update 2/"))
        os.kill(launcher, signal.SIGTERM)
        said = "".join(lines)
        assert "got SIGTERM; stopping and saving" in said and "interrupted and saved" in said
    assert not any(map(is_alive, ranks))
    done = max(updates(tmp_path / "run"))
    again = ("--resume", "run", f"run.num_updates={done + 2}")
    with job(tmp_path, *again) as (_, _, lines):
        assert "finished run" in "".join(lines)
    assert updates(tmp_path / "run") == list(range(done + 3))


@pytest.mark.slow
def test_no_rank_outlives_a_killed_launcher(tmp_path: Path) -> None:
    with job(tmp_path, "demo", "run.num_updates=500", *SMALL) as (launcher, ranks, lines):
        next(line for line in lines if line.startswith("update 1/"))
        os.kill(launcher, signal.SIGKILL)
        deadline = time.monotonic() + 15.0
        while any(map(is_alive, ranks)):
            assert time.monotonic() < deadline
            time.sleep(0.2)


def test_ranks_with_another_recipe_are_refused(tmp_path: Path) -> None:
    process = torchrun(2, "-m", "tests.distributed.laws", str(tmp_path), "unlike")
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode != 0
    assert re.search(r"rank 1 on \S+: its settings differ .*learn.lr was 0.01, now 0.5 there", said)
