"""A child process: by how much the resident memory rises in one forward and backward pass. Its
argument is JSON (`update`)."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import sys
from pathlib import Path


def peak_bytes() -> int | None:
    """Returns the most resident memory that this process had since `forget_peak`; None where the
    system does not say."""
    return _status("VmHWM")


def resident_bytes() -> int | None:
    """Returns the resident memory now; None where the system does not say."""
    return _status("VmRSS")


def _status(name: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next(
        (int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None
    )


def forget_peak() -> bool:
    """Gives freed memory back and starts the peak anew; returns whether the system can."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def main() -> None:
    """Prints the rise in bytes, or null."""
    from benchmarks.speed.stage import Stage
    from benchmarks.speed.update import arms_of

    asked = json.loads(sys.argv[1])
    stage = Stage(
        folder=Path(asked["folder"]),
        model=asked["model"],
        is_quick=asked["is_quick"],
        num_threads=asked["num_threads"],
        num_runs=1,
    )
    arm = arms_of(stage, asked["shape"], asked["dtype"])[1][asked["arm"]]()
    is_known = forget_peak()
    before = resident_bytes()
    arm.run()
    peak = peak_bytes()
    print(
        json.dumps(peak - before if is_known and peak is not None and before is not None else None)
    )


if __name__ == "__main__":
    main()
