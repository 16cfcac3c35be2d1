"""Child processes with a deadline: answers, limits, deaths, and what a script prints."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.error_codes import raises_code

from treegraft.core import workers
from treegraft.core.workers import WorkerPool

SCRIPT = """
import os, time
NAME = os.urandom(8).hex()
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
    return [NAME, request]
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


SPY = """
import os, socket
def answer(request):
    if request == "environment":
        return dict(os.environ)
    if request == "connect":
        try:
            socket.create_connection(("127.0.0.1", PORT), 5).close()
            return "reached"
        except OSError:
            return "refused"
    if request == "write":
        found = []
        for place in PLACES:
            try:
                open(os.path.join(place, "written"), "w").close()
                found.append(place)
            except OSError:
                pass
        return found
    try:
        return open(request).read()
    except OSError as error:
        return type(error).__name__
"""


def test_a_worker_has_no_key_no_files_and_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "hunter2")
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    script = tmp_path / "scripts" / "script.py"
    places = [str(tmp_path), sys.prefix, "/usr"]
    script.parent.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        script.write_text(SPY.replace("PORT", port).replace("PLACES", repr(places)))
        pool = WorkerPool(script, 1, task="answers", package="json")
        try:
            assert "hunter2" not in repr(pool.ask("environment", 60))
            if not workers._walls():
                pytest.skip("bubblewrap makes no sandbox here")
            assert pool.ask(str(secret), 60) == "FileNotFoundError"
            assert pool.ask("/etc/passwd", 60) == "FileNotFoundError"
            assert pool.ask(f"/proc/{os.getpid()}/environ", 60) == "FileNotFoundError"
            assert pool.ask("connect", 60) == "refused"
            # What it writes goes to a /tmp of its own, which ends with it.
            assert pool.ask("write", 60) in ([], [str(tmp_path)])
            assert not (tmp_path / "written").exists()
        finally:
            pool.close()


def test_without_bubblewrap_a_worker_answers_all_the_same(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_walls", lambda: ())
    assert pool.ask("hello", 60)[1] == "hello"
