"""How a run on a local cluster ends: interrupted, killed, asked for twice."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tests.cluster.nodes import Disturbed
from tests.cluster.parts import needs_ray
from tests.cluster.test_equal import BRANCHED, others_than_settings, single
from tests.cluster.worlds import LONGEST

from treegraft.train import train

pytestmark = [needs_ray, pytest.mark.slow]

TABLES = {**BRANCHED, "run": {"num_updates": 8}}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disturbed:
    """A run of which trees grow, beside the folder of an undisturbed one."""
    monkeypatch.setenv(LONGEST, "0")
    single(tmp_path, **TABLES)
    monkeypatch.setenv(LONGEST, "2")
    found = Disturbed.at(tmp_path, "local", **TABLES)
    found.until(lambda: found.num_lines() > 0, "an update")
    return found


def test_an_interrupted_run_goes_on(run: Disturbed, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        second = run.start("--resume", str(run.run))
        assert second.wait(120) == 3
        assert "another process is at work in it" in run.log.read_text()
        run.process.send_signal(signal.SIGINT)
        assert run.wait(120) == 130, run.log.read_text()
        assert "treegraft cluster --resume" in run.log.read_text()
        assert run.until_gone(60.0) == {}
        run.process = run.start("--resume", str(run.run))
        assert run.wait() == 0, run.log.read_text()
        assert run.until_gone(60.0) == {}
    finally:
        run.end()
    assert others_than_settings(run.folder / "single", run.run) == []


def test_nothing_is_left_of_a_killed_run(run: Disturbed, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on in one process: the same files come out."""
    run.process.kill()
    run.wait()
    assert run.until_gone(180.0) == {}
    monkeypatch.setenv(LONGEST, "0")
    train(None, resume=run.run, display=False)
    assert others_than_settings(run.folder / "single", run.run) == []


def test_all_actors_of_a_resumed_run_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They die when the checkpoint that they began with is gone."""
    tables = {**BRANCHED, "run": {"num_updates": 6}, "checkpoint": {"keep": 1}}
    monkeypatch.setenv(LONGEST, "0")
    single(tmp_path, **tables)
    monkeypatch.setenv(LONGEST, "2")
    run = Disturbed.at(tmp_path, "local", **tables, cluster={"engines": 2})
    try:
        run.until(lambda: run.num_lines() > 0, "an update")
        run.process.send_signal(signal.SIGINT)
        assert run.wait(120) == 130, run.log.read_text()
        done = run.num_lines()
        run.process = run.start("--resume", str(run.run))
        run.until(lambda: run.num_lines() > done + 1, "an update")
        run.kill()
        run.kill()
        assert run.wait() == 0, run.log.read_text()
    finally:
        run.end()
    assert others_than_settings(tmp_path / "single", run.run) == []
