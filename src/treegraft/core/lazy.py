"""Names of public modules that are loaded on first use."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def homes(file: str) -> dict[str, str]:
    """Returns the module of each public name that the stub beside a module imports: its text is
    what type checkers read, and nothing else has to list the names (as in SPEC 1 of Scientific
    Python).

    Args:
        file: `__file__` of the module.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {one.name: str(node.module) for node in imports for one in node.names}


def loader(module: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a public module, which loads a name from its home."""

    def load(name: str) -> Any:
        # Before the import: a wrong name must not cost one.
        if name not in places:
            raise AttributeError(f"module '{module}' has no attribute '{name}'")
        home = importlib.import_module(places[name])
        # Of a package it may be a module, which nobody has imported yet.
        found = getattr(home, name, None)
        return importlib.import_module(f"{places[name]}.{name}") if found is None else found

    return load
