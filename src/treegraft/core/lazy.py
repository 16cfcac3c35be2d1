"""Names that are loaded on first use: those of public modules, and what data do by code above
them."""

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


ABOVE: dict[str, str] = {}
"""What data and results do by code that stands above them: a name -> "module:name". The package
fills it, so that no arrow points up."""


def above(name: str) -> Any:
    """Returns the object of that name in `ABOVE`."""
    module, _, attribute = ABOVE[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
