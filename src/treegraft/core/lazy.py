"""Names of public modules that are loaded on first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def homes(names: Mapping[str, str]) -> dict[str, str]:
    """Returns the module of each public name.

    Args:
        names: the public names of each module below `treegraft`, with spaces between them.
    """
    return {one: f"treegraft.{home}" for home, some in names.items() for one in some.split()}


def loader(module: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a public module, which loads a name from its home."""

    def load(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module '{module}' has no attribute '{name}'")
        home = importlib.import_module(places[name])
        # Of a package it may be a module, which nobody has imported yet.
        found = getattr(home, name, None)
        return importlib.import_module(f"{places[name]}.{name}") if found is None else found

    return load
