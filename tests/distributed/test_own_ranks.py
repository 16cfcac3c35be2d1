"""`treegraft train learn.ranks=N` without torchrun: it starts the other ranks, and nothing that it
opens can be reached from another machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.distributed.jobs import DEADLINE_S, ROOT, children
from tests.distributed.test_jobs import SMALL, is_alive, updates
from tests.support.tiny import tiny

from treegraft import SettingError, train
from treegraft.core.errors import RankError

LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
"""127.0.0.1 and ::1 as /proc/net/tcp and tcp6 write them."""


def listening(pid: int) -> set[str]:
    """Returns the addresses at which a process listens, in the kernel's hexadecimal."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(link))
        except OSError:  # closed meanwhile
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.add(fields[1].partition(":")[0])
    return found


@contextmanager
def job(tmp_path: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], Iterator[str]]]:
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    process = subprocess.Popen(
        [sys.executable, "-m", "treegraft", "train", *words, "learn.ranks=2"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process, iter(process.stdout)
    finally:
        process.kill()
        process.wait(DEADLINE_S)
        process.stdout.close()


@pytest.mark.smoke
def test_ctrl_c_saves_and_nothing_listens_beyond_loopback(tmp_path: Path) -> None:
    with job(tmp_path, "demo", "run.num_updates=500", *SMALL) as (process, lines):
        next(line for line in lines if line.startswith("update 1/"))
        (other,) = children(process.pid)
        seen = listening(process.pid) | listening(other)
        assert seen and seen <= LOOPBACK, seen
        # Where they meet, nobody else may look.
        command = Path(f"/proc/{other}/cmdline").read_text().split("\0")
        folder = Path(str(urlsplit(command[-3]).path)).parent
        assert folder.stat().st_mode & 0o777 == 0o700
        process.send_signal(signal.SIGINT)
        said = "".join(lines)
        assert process.wait(DEADLINE_S) == 130 and "interrupted and saved" in said
        assert not is_alive(other) and not folder.exists()
    done = max(updates(tmp_path / "run"))
    again = ("--resume", "run", f"run.num_updates={done + 1}")
    with job(tmp_path, *again) as (process, lines):
        assert "finished run" in "".join(lines) and process.wait(DEADLINE_S) == 0
    assert updates(tmp_path / "run") == list(range(done + 2))


@pytest.mark.smoke
def test_a_killed_rank_is_named_and_none_outlives_the_first(tmp_path: Path) -> None:
    with job(tmp_path, "demo", "run.num_updates=500", *SMALL) as (process, lines):
        next(line for line in lines if line.startswith("update 1/"))
        (other,) = children(process.pid)
        os.kill(other, signal.SIGKILL)
        said = "".join(lines)
        assert f"process {other}) has ended" in said and process.wait(DEADLINE_S) == 1
    with job(tmp_path, "--resume", "run") as (process, lines):
        next(line for line in lines if line.startswith("update "))
        (other,) = children(process.pid)
        process.kill()
        deadline = time.monotonic() + 15.0
        while is_alive(other):
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.smoke
def test_python_starts_them_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    settings = tiny(
        run={"dir": str(tmp_path), "name": "two", "num_updates": 1},
        warmup={"num_steps": 2},
        learn={"ranks": 2},
    )
    before = dict(os.environ)
    result = train(settings, display=False)
    assert result.metrics["policy_version"] == 1
    changed = {name for name, value in os.environ.items() if before.get(name) != value}
    # Inductor sets it once it needs its cache.
    allowed = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TORCHINDUCTOR_CACHE_DIR"}
    assert changed <= allowed and before.keys() <= os.environ.keys()
    with pytest.raises(SettingError, match=r"learn\.ranks = 2 runs in other processes"):
        others = {name: table for name, table in settings.items() if name != "reward"}
        train(others, rewards=[lambda completions, **_: [0.0]])


def test_a_rank_that_never_comes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    settings = tiny(run={"dir": str(tmp_path), "name": "run"}, learn={"ranks": 2})
    began = time.monotonic()
    with pytest.raises(RankError, match="rank 1 has ended with status 1 before it came"):
        train(settings, display=False)
    assert time.monotonic() - began < 60 and not (tmp_path / "run").exists()
