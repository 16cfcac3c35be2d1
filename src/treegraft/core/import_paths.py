"""Import paths "package.module:name" and names in recipes: the objects that they lead to, and
errors of the user's code there."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from inspect import get_annotations
from pathlib import Path
from typing import Any

from treegraft.core.errors import SettingError, TreegraftError, about, nearest
from treegraft.core.given import GIVEN, find_given
from treegraft.core.removed import instead


def unknown_name(name: str, known: Iterable[str], setting: str) -> str:
    """Returns the sentence that refuses `name` as the value of a setting, "" where it is known or
    has the shape of an import path."""
    known = list(known)
    module, _, attribute = name.partition(":")
    if name in known or (module and attribute):
        return ""
    choice = f"one of {', '.join(known)}, or " if known else ""
    return (
        f"{setting}: got '{name:.99}', expected {choice}an import path 'package.module:name'."
        f"{instead(name) or nearest(name, known)}"
    )


def pick(name: str, table: Mapping[str, Any], setting: str) -> Any:
    """Returns the entry of that name in `table`, or else the object at an import path.

    Args:
        setting: dotted name of the setting, for errors.

    Raises:
        SettingError: an unknown name, with the nearest known one; an import path to nothing.
    """
    if name in table:
        return table[name]
    if ":" not in name:
        raise SettingError(
            unknown_name(name, table, setting), settings=[setting], code="unknown-name"
        )
    # Its errors know the path alone.
    with about(setting):
        return load_object(name)


@contextmanager
def blaming(path: str, setting: str, doing: str = "") -> Iterator[None]:
    """Turns an error of the user's code at `path` that the block runs into a `SettingError` that
    says where it was raised; the package's own errors pass.

    Args:
        doing: what the code was asked for, such as " in fill, at task 'x'".
    """
    try:
        yield
    except TreegraftError:
        raise
    except Exception as error:
        # The innermost line is the one to mend.
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise SettingError(
            f"{setting}: '{path}' raised {type(error).__name__}{doing}: {error} ({last.filename},"
            f" line {last.lineno}); mend it there.",
            settings=[setting],
            code="own-code-raised",
        ) from error


def make(maker: Any, protocol: type, path: str, setting: str, **arguments: Any) -> Any:
    """Returns the object that the user's class or function at `path` makes of the arguments.

    Args:
        protocol: whose members it has to have.
        setting: dotted name of the setting, for errors.

    Raises:
        SettingError: it cannot be called so, it raises, or members are missing.
    """
    try:
        # Bound first, so that a TypeError of the user's own code is told as such.
        with suppress(ValueError):  # some built-in callables have no signature
            inspect.signature(maker).bind(**arguments)
    except TypeError as error:
        raise SettingError(
            f"{setting}: '{path}' could not be called with"
            f" {', '.join(arguments) or 'no arguments'}: {error}",
            settings=[setting],
            code="own-code-call",
        ) from error
    with blaming(path, setting):
        found = maker(**arguments)
    members = {name for base in protocol.__mro__ for name in (*vars(base), *get_annotations(base))}
    # All at once, since each would cost the user another start.
    missing = sorted(
        name for name in members if not name.startswith("_") and not hasattr(found, name)
    )
    if missing:
        raise SettingError(
            f"{setting}: '{path}' gives a {type(found).__name__} without {', '.join(missing)};"
            f" expected every member of {protocol.__module__}.{protocol.__qualname__}.",
            settings=[setting],
            code="members-missing",
        )
    return found


def load_object(path: str) -> Any:
    """Returns the object at "package.module:name" (dots after the colon go into attributes), or the
    one that was given as "given:name".

    Modules in the working directory are found. Raises `SettingError` when the path has another
    shape, the module does not exist or fails to import, or the module has no such name.
    """
    if path.startswith(GIVEN):
        try:
            return find_given(path)
        except KeyError:
            raise SettingError(
                f"'{path}' is the name of a Python object that a script or notebook gave to"
                " Treegraft; got no such object here. Pass it again, for example"
                " treegraft.train(resume=..., rewards=...).",
                code="object-not-given",
            ) from None
    module_name, colon, attributes = path.partition(":")
    if colon and module_name.endswith(".py"):
        raise SettingError(
            f"'{path}' names a file; write '{Path(module_name).stem}:{attributes}', and start from"
            " the folder that holds it.",
            code="import-path-file",
        )
    if not colon or not all(
        part.isidentifier() for part in (*module_name.split("."), *attributes.split("."))
    ):
        raise SettingError(
            f"'{path}' is no import path; write 'package.module:name'.", code="import-path-invalid"
        )
    directory = os.getcwd()
    if directory not in sys.path and "" not in sys.path:
        # A console script does not see its working directory. Appended, it cannot shadow an
        # installed module.
        sys.path.append(directory)
    return imported(path)


def imported(path: str) -> Any:
    """Returns the object at an import path from the modules that Python finds now. Raises
    `SettingError` as `load_object` does."""
    module_name, _, attributes = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # The module itself or a package around it, or one that it imports?
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise SettingError(
                f"'{path}': there is no module '{error.name}'; install it, or start from the folder"
                f" that holds it.{instead(module_name)}",
                code="import-module-missing",
            ) from error
        raise SettingError(
            f"'{path}': importing '{module_name}' needs '{error.name}', which is not installed;"
            f" run: pip install {(error.name or '').partition('.')[0]}",
            code="import-needs-package",
        ) from error
    # Whatever foreign code raises, an exit too, the message has to name it.
    except (Exception, SystemExit) as error:
        raise SettingError(
            f"'{path}': importing '{module_name}' failed: {type(error).__name__}: {error}",
            code="import-failed",
        ) from error
    # Step by step, to name the part that is missing.
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            raise SettingError(
                f"'{path}': no '{attribute}' in '{module_name}'.{nearest(attribute, dir(found))}",
                code="import-name-missing",
            )
        found = getattr(found, attribute)
    return found
