"""A recipe from its file: its base, its own tables, and its smoke test."""

from __future__ import annotations

import os.path
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treegraft.core.errors import SettingError, nearest
from treegraft.core.shipped import FOLDERS, Kind, by_name
from treegraft.settings.plain import read_tables, shown

BASE = "base"
SMOKE = "smoke"
FOLDER = "$RECIPE_DIR"
MOST_BASES = 4
"""Longest chain of recipes, or studies, that build on one another."""


def read_recipe(path: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Returns the settings of a recipe, and the overlay of its smoke test; None without one.

    `base = "other.toml"` reads the tables of another recipe and puts those of this one over them: a
    file named from the folder of this recipe, or else the name of a shipped one. `[smoke]` has
    the settings that differ in a smoke test, as tables of the same names. `$RECIPE_DIR` at the
    beginning of a text is the recipe's folder.

    Raises:
        SettingError: no such file, one that cannot be read, or bases in a circle.
    """
    tables = read_based(path)
    # Taken out: it is no table of settings, and unknown ones are refused.
    smoke = tables.pop(SMOKE, None)
    return tables, smoke


def read_based(path: Path, kind: Kind = "recipe", below: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Returns the tables of a recipe or study over those of its base, [smoke] among them.

    Args:
        below: the files that build on this one.

    Raises:
        SettingError: as `read_recipe`.
    """
    tables = read_tables(path, kind)
    # A file of that name comes before a shipped recipe.
    place = path if path.is_file() else by_name(kind)[str(path)]
    data: dict[str, Any] = _located(tables, str(place.resolve().parent))
    base = data.pop(BASE, None)
    if not isinstance(smoke := data.get(SMOKE, {}), dict):
        raise SettingError(
            f"{path}: '{SMOKE}': got {shown(smoke)}, expected a table.", code="smoke-no-table"
        )
    if base is None:
        return data
    if not isinstance(base, str):
        raise SettingError(
            f"{path}: '{BASE}': got {shown(base)}, expected the path of a {kind}.",
            code="base-no-path",
        )
    chain = (*below, place.resolve())
    other = _base_of(path, place.parent, base, kind)
    if other in chain or len(chain) > MOST_BASES:
        names = " -> ".join(one.name for one in (*chain, other))
        raise SettingError(
            f"{path}: '{BASE}': {FOLDERS[kind]} build on one another in a circle, or more than"
            f" {MOST_BASES} deep: {names}. Leave one of them out.",
            code="base-circle",
        )
    # The base first: what is nearer overrides.
    return merged(read_based(other, kind, chain), data)


def _base_of(path: Path, folder: Path, base: str, kind: Kind) -> Path:
    """The file of a base."""
    # Unlike Path.is_file it raises nothing for a name that is too long.
    if os.path.isfile(folder / base):
        return (folder / base).resolve()
    shipped = by_name(kind)
    name = base.removesuffix(".toml")
    if name not in shipped:
        raise SettingError(
            f"{path}: '{BASE}': got {shown(base)}, which is neither a file in '{folder}' nor the"
            f" name of a shipped {kind} ({', '.join(shipped)}).{nearest(name, shipped)}",
            code="base-missing",
        )
    return shipped[name].resolve()


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested tables with those of later layers put over those of earlier ones; a list or
    value replaces what was there."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            both_tables = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
            result[key] = merged(result[key], value) if both_tables else value
    return result


def _located(value: Any, folder: str) -> Any:
    if isinstance(value, dict):
        return {key: _located(one, folder) for key, one in value.items()}
    if isinstance(value, list):
        return [_located(one, folder) for one in value]
    is_path = isinstance(value, str) and value.startswith(FOLDER)
    return folder + value.removeprefix(FOLDER) if is_path else value


def flatten(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested tables by dotted names; lists are values, and so are empty tables."""
    found: dict[str, Any] = {}
    for name, value in tables.items():
        if isinstance(value, Mapping) and value:
            found |= flatten(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
