"""Settings of the python tool, and what brings it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from treegraft.parts import Finding, Registry, Settings, setting

_HERE = "treegraft.extras.python"


class PythonToolSettings(Settings):
    backend: Literal["auto", "monty", "bwrap"] = "auto"
    """"monty": a small interpreter without libraries, anywhere; "bwrap": CPython with numpy, scipy
    and sympy in a bubblewrap sandbox (Linux); "auto": bubblewrap where it works, else Monty. A run
    records which one it began with, and goes on with it."""
    max_duration_s: float = setting(2.0, gt=0)
    """Execution time of one call, in seconds."""
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
