"""Python objects in place of names: settings have a name, and the objects are at hand for as
long as a run needs them.

An object that can be imported gets its import path, so that any process finds it again. Any other
(a lambda, a closure, a class of a notebook) gets a name such as "given:brief", which leads to it
within `giving(objects)` alone.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

GIVEN: Final = "given:"


@dataclass(frozen=True, slots=True)
class Record:
    """What a run folder records of an object.

    Record(argument="rewards", name="given:brief", qualified="__main__.brief", checksum="3f5a...")
    """

    argument: str
    """The argument of `treegraft.train` that it came by."""
    name: str
    """Its name in the settings."""
    qualified: str
    """Module and name in it."""
    checksum: str
    """SHA-256 of its source or, of data, of its rows; empty where it has neither."""


@dataclass
class GivenObjects:
    """The objects of one run."""

    records: list[Record] = field(default_factory=list)
    by_name: dict[str, Any] = field(default_factory=dict)
    """Those that have no import path."""
    _originals: dict[str, Any] = field(default_factory=dict)

    def add(self, argument: str, value: Any, wrapped: Any = None, *, stem: str = "") -> str:
        """Returns the name of an object in settings: its import path where that leads to it.

        Args:
            argument: the argument that it came by.
            wrapped: what the name leads to in place of `value`; None for `value` itself.
            stem: the name that is wanted; empty for the object's own.
        """
        # By identity: equal objects may be of different runs.
        for name, known in self._originals.items():
            if known is value:
                return name
        name = "" if wrapped is not None else import_path(value)
        if not name:
            stem = stem or _own_name(value) or argument.removesuffix("s")
            taken = (stem, *(f"{stem}_{number}" for number in range(2, len(self.by_name) + 3)))
            name = GIVEN + next(one for one in taken if GIVEN + one not in self.by_name)
            self.by_name[name] = value if wrapped is None else wrapped
        self._originals[name] = value
        # Of a DataFrame its rows, not the source of its class.
        data = value if wrapped is None or callable(wrapped) else wrapped
        self.records.append(Record(argument, name, _qualified(value), _checksum(data)))
        return name

    def joined(self, others: GivenObjects) -> GivenObjects:
        """Returns these objects and others, which come first where names are equal."""
        return GivenObjects(
            records=[*self.records, *others.records],
            by_name={**self.by_name, **others.by_name},
            _originals={**self._originals, **others._originals},
        )


_PRESENT: ContextVar[GivenObjects | None] = ContextVar("given", default=None)


@contextmanager
def giving(objects: GivenObjects) -> Iterator[None]:
    """Lets the names of these objects lead to them for the time of the block, in its thread, its
    tasks, and threads that take over its context."""
    # Of this context: two runs in two threads have their own.
    token = _PRESENT.set(objects)
    try:
        yield
    finally:
        _PRESENT.reset(token)


def present() -> GivenObjects:
    """Returns the objects whose names lead to them here."""
    return _PRESENT.get() or GivenObjects()


def find_given(name: str) -> Any:
    """Returns the object of a name that begins with `GIVEN`. Raises `KeyError` where it was not
    given here."""
    return present().by_name[name]


def import_path(value: Any) -> str:
    """Returns "package.module:name" where that leads to the object in any process, else an empty
    string."""
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__":
        return ""
    found: Any = sys.modules.get(module)
    # As far as the name leads back: a decorator may have taken its place.
    for part in name.split("."):
        found = getattr(found, part, None)
    # Modules of a notebook or of `exec` have no file that another process could import.
    has_file = getattr(sys.modules.get(module), "__spec__", None) is not None
    return f"{module}:{name}" if found is value and has_file else ""


def _own_name(value: Any) -> str:
    """A name for an object: its own where that is an identifier, else its class's."""
    value = _unwrapped(value)
    name = getattr(value, "__name__", None) or type(value).__name__
    return name if name.isidentifier() else ""


def _unwrapped(value: Any) -> Any:
    """The function behind partial ones."""
    # Partials have no name and no source.
    while isinstance(value, functools.partial):
        value = value.func
    return value


def _qualified(value: Any) -> str:
    value = _unwrapped(value)
    owner = value if hasattr(value, "__qualname__") else type(value)
    return f"{owner.__module__}.{owner.__qualname__}"


def _checksum(value: Any) -> str:
    value = _unwrapped(value)
    # Rows: their contents decide what a run learns.
    if isinstance(value, Sequence | Mapping):
        text = json.dumps(value, default=repr, sort_keys=True)
    else:
        try:
            text = inspect.getsource(value if hasattr(value, "__qualname__") else type(value))
        except (OSError, TypeError):  # written in C, or typed into an interpreter without history
            return ""
    # Addresses of objects without a text of their own change with each process.
    return hashlib.sha256(re.sub(r" at 0x[0-9a-f]+", "", text).encode()).hexdigest()
