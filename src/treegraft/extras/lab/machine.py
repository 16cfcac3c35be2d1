"""The machine of a measurement."""

from __future__ import annotations

import datetime
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from treegraft import __version__


def machine(num_threads: int) -> dict[str, Any]:
    """Returns the facts that belong to a measurement: date, processor, versions, load
    average."""
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": _cpu_name(),
        "num_cpus": _num_cpus(),
        "num_threads": num_threads,
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "transformers": metadata.version("transformers"),
        "treegraft": __version__,
        "load_average": load_average(),
    }


def load_average() -> float | None:
    """Returns the mean number of busy processes in the last minute; None if the system reports
    none."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _num_cpus() -> int:
    # A container may be limited to fewer processors than the machine has.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )
