"""torchrun jobs on this machine, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEADLINE_S = 240.0


def torchrun(num_ranks: int, *command: str, cwd: Path = ROOT) -> subprocess.Popen[str]:
    """Starts `command` (what follows `python`) in so many processes, their output in one pipe."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
            *command,
        ],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def children(pid: int) -> list[int]:
    """Returns the processes that a process has started, in order."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(child) for child in found.split()]
