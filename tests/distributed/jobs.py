"""torchrun jobs on this machine, for tests."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.support.forked import Forked

ROOT = Path(__file__).parents[2]
DEADLINE_S = 240.0


def torchrun(num_ranks: int, *command: str, cwd: Path = ROOT) -> subprocess.Popen[str]:
    """Starts `command` (what follows `python`) in so many processes, their output in one pipe."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(num_ranks),
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            "localhost:0",
            *command,
        ],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ranks_of(num_ranks: int, *words: str) -> tuple[list[int], list[str]]:
    """Runs `python -m WORDS` as so many ranks without torchrun, for what is not about their start;
    returns the exit code of each, and what each printed."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks)}
    ranks = []
    for rank in map(str, range(num_ranks)):
        own = {**os.environ, **place, "RANK": rank, "LOCAL_RANK": rank}
        ranks.append(Forked(words, cwd=ROOT, env=own, stderr=subprocess.STDOUT))
    try:
        return [rank.wait(DEADLINE_S) for rank in ranks], [rank.stdout.read() for rank in ranks]
    finally:
        for rank in ranks:
            rank.close()


def children(pid: int) -> list[int]:
    """Returns the processes that a process has started, in order."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(child) for child in found.split()]
