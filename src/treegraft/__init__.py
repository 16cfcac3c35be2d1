"""Treegraft trains language-model agents that use tools, with reinforcement learning on trees of
steps."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from treegraft.core.lazy import homes, loader
from treegraft.core.moved import find_moved
from treegraft.core.shown import ABOVE

__version__ = "0.8.0.dev0"

_HOMES = homes(__file__)
"""The module of each public name, loaded on first use: importing treegraft does not import
torch."""
__all__ = sorted([*_HOMES, "__version__"])


class _Package(ModuleType):
    """A package whose attribute `train` is the function, also once its module is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system binds each submodule to its name in the package.
        if name in _HOMES and isinstance(value, ModuleType):
            return
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
find_moved()
ABOVE.update(
    {
        "text": "treegraft.view.text:as_text",
        "html": "treegraft.view.text:as_html",
        "agent": "treegraft.evals.agent:Agent",
        "viewer": "treegraft.view.inline:Viewer",
    }
)


__getattr__ = loader("treegraft", _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
