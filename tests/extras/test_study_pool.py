"""Workers of a study: what they have done is not lost when they are ended."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from treegraft.extras.lab.study import pool as pools
from treegraft.extras.lab.study.pool import Outcome, Pool

LARGE = 1_000_000
"""More bytes than a pipe holds."""


def work(job: str) -> str:
    """Answers "large" at length; any other job is a file that tells what has become of it."""
    if job == "large":
        return "x" * LARGE
    path = Path(job)
    path.write_text("begun")
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        path.write_text("saved")
        raise
    return job


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN], ids=["terminal", "script"])
def sigint(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SIGINT as a terminal gives it, and ignored as a script's `&` does."""
    monkeypatch.setattr(pools, "END_S", 30.0)
    before = signal.signal(signal.SIGINT, request.param)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("sigint")
def test_an_answer_that_has_arrived_is_taken_and_the_others_save(tmp_path: Path) -> None:
    pool = Pool(work, 2)
    path = tmp_path / "job"
    pool.start("large")
    assert wait(list(pool._jobs), 60)
    pool.start(str(path))
    while not path.exists() or not path.read_text():
        time.sleep(0.01)
    workers = list(pool._workers.values())
    # It has no room for its answer in the pipe, and waits.
    assert list(pool.end()) == [Outcome("large", "x" * LARGE)]
    assert path.read_text() == "saved"
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert pool.num_running == 0


@pytest.mark.usefixtures("sigint")
def test_workers_that_are_still_being_loaded_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pool = Pool(work, 1)
    pool.start(str(tmp_path / "job"))
    (worker,) = pool._workers.values()
    assert list(pool.end()) == []
    assert worker.exitcode == 0
    assert "Traceback" not in capfd.readouterr().err


def test_workers_without_a_job_end_and_a_killed_pool_is_empty() -> None:
    pool = Pool(work, 1)
    pool.start("large")
    assert [outcome.error for outcome in pool.outcomes()] == [""]
    (worker,) = pool._workers.values()
    assert list(pool.end()) == [] and worker.exitcode == 0
    pool.start("large")
    (worker,) = pool._workers.values()
    pool.kill()
    assert worker.exitcode == -signal.SIGKILL and pool.num_running == 0


def test_a_worker_that_is_killed_without_a_job_is_replaced() -> None:
    pool = Pool(work, 1)
    for _ in range(2):
        pool.start("large")
        assert [outcome.error for outcome in pool.outcomes()] == [""]
        (worker,) = pool._workers.values()
        worker.kill()
        worker.join()
    pool.kill()


KEPT: list[bytes] = []


def _resident_mb(fill: bool) -> float:
    """Fills 200 MB of the heap and frees all but its last block, or only looks."""
    blocks = [bytes([1]) * 100_000 for _ in range(2000)] if fill else []
    KEPT.extend(blocks[-1:])
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and glibc's heap")
def test_memory_that_a_job_has_freed_goes_back_to_the_system() -> None:
    pool, found = Pool(_resident_mb, 1), []
    for fill in (True, False):
        pool.start(fill)
        found += [one.result for one in pool.outcomes()]
    pool.kill()
    full, after = found
    assert after < full - 150
