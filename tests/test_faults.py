"""The fault campaign, in small and in full."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def campaign(folder: Path, *arguments: object) -> str:
    """Returns what the campaign printed; it ends with 1 where something was wrong."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.fault_campaign", folder, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="prlimit and mounts are Linux's")
@pytest.mark.slow  # the campaign in miniature; tests/test_resume.py kills and resumes by default
def test_a_few_faults(tmp_path: Path) -> None:
    printed = campaign(tmp_path, "--num", 2, "--only", "full", "read-only")
    assert "2 faults in 1 runs, 0 wrong" in printed and "1 runs with equal bytes" in printed


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="prlimit and mounts are Linux's")
def test_a_hundred_faults(tmp_path: Path) -> None:
    assert "100 faults in 34 runs, 0 wrong" in campaign(tmp_path, "--num", 100)
