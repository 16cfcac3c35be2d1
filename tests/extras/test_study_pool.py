"""Workers of a study: what they have done is not lost when they are ended."""

from __future__ import annotations

import signal
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
    assert wait(list(pool._workers), 60)
    pool.start(str(path))
    while not path.exists() or not path.read_text():
        time.sleep(0.01)
    workers = [process for _, process in pool._workers.values()]
    # It has no room for its answer in the pipe, and waits.
    assert list(pool.end()) == [Outcome("large", "x" * LARGE)]
    assert path.read_text() == "saved"
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert pool.num_running == 0


@pytest.mark.usefixtures("sigint")
def test_workers_that_have_just_begun_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pool = Pool(work, 1)
    pool.start(str(tmp_path / "job"))
    assert list(pool.end()) == []
    assert pool.num_running == 0 and "Traceback" not in capfd.readouterr().err


def test_a_worker_that_is_killed_fails_its_own_job_alone(tmp_path: Path) -> None:
    pool = Pool(work, 2)
    pool.start(str(tmp_path / "job"))
    ((_, process),) = pool._workers.values()
    process.kill()
    (outcome,) = pool.outcomes()
    assert "signal 9" in outcome.error and pool.num_running == 0
    pool.start("large")
    assert [outcome.error for outcome in pool.outcomes()] == [""]
    pool.start(str(tmp_path / "job"))
    ((_, process),) = pool._workers.values()
    pool.kill()
    assert process.exitcode == -signal.SIGKILL and pool.num_running == 0
