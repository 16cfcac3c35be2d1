"""Settings of the python tool, and what brings it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from treegraft.parts import Finding, Registry, Settings, setting, when

_HERE = "treegraft.extras.python"


class PythonToolSettings(Settings):
    backend: Literal["auto", "monty", "bwrap"] = "auto"
    """"monty": a small interpreter without libraries, anywhere; "bwrap": CPython with numpy, scipy
    and sympy in a bubblewrap sandbox (Linux); "auto": bubblewrap where it works, else Monty. A run
    records which one it began with and keeps it."""
    max_duration_s: float = setting(2.0, gt=0)
    """Execution time of one call, in seconds."""
    max_memory_mb: int | None = setting(None, ge=1)
    """Memory of one call, in MiB, libraries not counted; None is 64 for "monty" and 512 for
    "bwrap"."""
    max_files_mb: int = setting(16, ge=1, idle_unless=when("tools.python.backend", "auto", "bwrap"))
    """Room for the files of one call in its private /tmp, in MiB ("bwrap")."""
    max_threads: int = setting(16, ge=1, idle_unless=when("tools.python.backend", "auto", "bwrap"))
    """Threads of one call, which cannot start processes ("bwrap")."""
    num_workers: int = setting(2, ge=1)
    """Worker processes ("monty") or sandboxes ("bwrap")."""


def _needs(config: Any) -> Iterator[tuple[str, str]]:
    if "python" in config.tools.use and config.tools.python.backend == "monty":
        yield "the python tool without bubblewrap", "pydantic_monty"


def findings(config: Any) -> Iterator[Finding]:
    """Whether a sandbox works here."""
    if "python" in config.tools.use and config.tools.python.backend == "bwrap":
        from treegraft.extras.python.bwrap import find_problem

        problem = find_problem()
        value = f"{config.tools.python.num_workers} bubblewrap sandboxes"
        yield Finding("sandboxes", "missing" if problem else value, problem is None, problem or "")


def register(registry: Registry) -> None:
    """Registers the python tool, the choice of its backend, and what doctor says of it."""
    registry.tool("python", f"{_HERE}.tool:python_tool", table=PythonToolSettings, needs=_needs)
    registry.part("choice", "tools.python.backend", f"{_HERE}.tool:backend_here")
    registry.part("finding", "sandboxes", findings)
