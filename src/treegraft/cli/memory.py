"""The memory that is free on this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Room:
    """Memory in bytes. Room(free=3_000_000_000, whole=8_000_000_000, place="this machine")"""

    free: int
    whole: int
    place: str
    """Whose it is, in words."""


def _meminfo() -> Room | None:
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        sizes = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        return Room(sizes["MemAvailable"], sizes["MemTotal"], "this machine")
    with contextlib.suppress(ValueError, OSError, AttributeError):  # systems without /proc
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Room(whole, whole, "this machine")
    return None


def _control_groups(root: Path) -> Iterator[Room]:
    """The limits of this process's control group and of those above it, of version 2 and 1."""
    own = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        own = next((line.rpartition(":")[2] for line in lines if line.startswith("0::")), "")
    folder = root / own.strip("/")
    # In a container the path may be the host's, of which only the root is to be seen.
    folders = [folder, *folder.parents][: len(folder.parts) - len(root.parts) + 1]
    files = [(one, "memory.max", "memory.current", "inactive_file") for one in folders]
    version_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    for place, limit_file, used_file, cached in (*files, (root / "memory", *version_1)):
        with contextlib.suppress(OSError, ValueError, IndexError):
            limit = int((place / limit_file).read_text(encoding="ascii"))
            used = int((place / used_file).read_text(encoding="ascii"))
            stat = (place / "memory.stat").read_text(encoding="ascii")
            # Read files count as used, and make room when it is wanted.
            reclaimed = int(stat.partition(f"\n{cached} ")[2].split()[0])
            yield Room(max(0, limit - used + reclaimed), limit, "this control group")


def memory_room(root: Path = Path("/sys/fs/cgroup")) -> Room | None:
    """Returns the memory that this process may still take: of the machine, or of a control group
    that allows less; None where neither is known."""
    rooms = [room for room in (_meminfo(), *_control_groups(root)) if room is not None]
    return min(rooms, key=lambda room: room.free, default=None)


def gpu_room() -> Room | None:
    """Returns the memory of the first GPU; None without one."""
    for line in _nvidia_smi("memory.free,memory.total", "--format=csv,noheader,nounits"):
        with contextlib.suppress(ValueError):
            free, whole = (int(one) * 2**20 for one in line.split(","))
            return Room(free, whole, "the GPU")
    return None


def gpus() -> list[str]:
    """Returns the NVIDIA GPUs as their driver names them; empty without a driver."""
    return _nvidia_smi("name,memory.total", "--format=csv,noheader")


def _nvidia_smi(columns: str, form: str) -> list[str]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, f"--query-gpu={columns}", form]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = found.stdout.splitlines() if found.returncode == 0 else []
    return [line.strip() for line in lines if line.strip()]


def gigabytes(num_bytes: float) -> str:
    """Returns a size for people: "512 MB", "2.1 GB"."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"
