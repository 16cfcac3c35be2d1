"""Child processes with a deadline: answers, limits, deaths, and what a script prints."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.error_codes import raises_code

from treegraft.core import workers
from treegraft.core.workers import WorkerPool

SCRIPT = """
import os, time
def answer(request):
    print("a library's noise")
    if request == "spin":
        while True:
            pass
    if request == "sleep":
        time.sleep(60)
    if request == "die":
        os._exit(1)
    if request == "hoard":
        try:
            return len(bytearray(4 << 30))
        except MemoryError:
            return "too much"
    return [os.getpid(), request]
"""


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[WorkerPool]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    made = WorkerPool(script, 1, task="answers", package="json")
    yield made
    made.close()


def test_one_process_answers_until_it_is_stopped(pool: WorkerPool) -> None:
    pool.start()
    process, echo = pool.ask({"ä": [1, None]}, 60)
    assert echo == {"ä": [1, None]}
    assert pool.ask("again", 60) == [process, "again"]
    assert pool.ask("hoard", 60) == "too much"
    began = time.monotonic()
    assert pool.ask("sleep", 0.2) is None
    assert pool.ask("spin", 60, cpu_s=0.2) is None
    assert pool.ask("die", 60) is None
    assert time.monotonic() - began < 30
    other, _ = pool.ask("still here", 60)
    assert other != process and len(pool._workers) == 1
    pool.close()
    assert pool.ask("after the end", 60)[1] == "after the end"


def test_a_process_that_does_not_start_or_become_free(
    tmp_path: Path, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = WorkerPool(tmp_path / "missing.py", 1, task="answers", package="some_package")
    for _ in range(2):
        with raises_code("worker-not-started"):
            broken.ask(1, 60)
    assert not broken._workers
    monkeypatch.setattr(workers, "START_DEADLINE_S", 0.1)
    pool._free.get()
    with raises_code("worker-late"):
        pool.ask(1, 60)
