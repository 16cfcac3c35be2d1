"""Modules of an earlier version under their former names, for one release."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from treegraft.core.registry import EXTRAS

PACKAGE = "treegraft."


class Moved(MetaPathFinder, Loader):
    """Finds what `MOVED` of the extensions names, and warns of it. It stands last, so it is asked
    for modules alone that nobody else finds."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns how a moved module is loaded, None for any other."""
        if not fullname.startswith(PACKAGE) or fullname.startswith(EXTRAS) or not _now(fullname):
            return None
        return importlib.util.spec_from_loader(fullname, self)

    def create_module(self, spec: ModuleSpec) -> Any:
        """Returns the module where it is now."""
        now = _now(spec.name)
        warnings.warn(
            f"{spec.name} is {now} now; the former name goes with the next version",
            DeprecationWarning,
            stacklevel=2,
        )
        return importlib.import_module(now)

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: the module has run under its own name."""


def _now(name: str) -> str:
    """The present name of a moved module, "" for one that has not moved."""
    try:
        moved: dict[str, str] = importlib.import_module(EXTRAS).MOVED
    except ImportError:
        return ""
    for old, new in moved.items():
        if f"{name}.".startswith(f"{old}."):
            return new + name.removeprefix(old)
    return ""


def find_moved() -> None:
    """Lets imports of this process find moved modules."""
    if not any(isinstance(one, Moved) for one in sys.meta_path):
        sys.meta_path.append(Moved())
