"""The python tool by its settings, in the sandbox that works here."""

from __future__ import annotations

from typing import Any

from treegraft.extras.python import bwrap
from treegraft.parts import interfaces, packages


def backend_here(config: Any) -> str:
    """Returns the backend that "auto" means on this machine: bubblewrap where a first sandbox
    works, else Monty; "auto" where the tool is not used."""
    if "python" not in config.tools.use:
        return "auto"
    return "monty" if bwrap.find_problem() else "bwrap"


def python_tool(tools: Any) -> interfaces.Tool:
    """Returns the tool of the table [tools].

    Raises:
        SettingError: no sandbox can be started, or Monty is not installed.
    """
    backend = tools.python.backend
    if backend == "monty" or (backend == "auto" and bwrap.find_problem()):
        packages.require("the python tool without bubblewrap", "pydantic_monty")
        from treegraft.extras.python.monty_tool import MontyTool

        return MontyTool(tools.python)
    from treegraft.extras.python.bwrap_tool import BwrapTool

    return BwrapTool(tools.python)
