"""Recipes, studies and examples that come with the package: in a wheel (without the studies), or in
the clone it runs from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

_PACKAGE = Path(__file__).resolve().parents[1]
Kind = Literal["recipe", "study"]
FOLDERS: Mapping[Kind, Literal["recipes", "studies"]] = {"recipe": "recipes", "study": "studies"}
_PATTERNS: Mapping[Kind, str] = {"recipe": "**/*.toml", "study": "*.toml"}
"""Below studies/ are tables that studies share."""


def shipped(kind: Literal["recipes", "studies", "examples"]) -> Path:
    """Returns the folder of the shipped recipes, studies or examples."""
    # A wheel holds them in the package; an editable installation leaves them in the clone.
    installed = _PACKAGE / kind
    return installed if installed.is_dir() else _PACKAGE.parents[1] / kind


def by_name(kind: Kind) -> dict[str, Path]:
    """Returns the shipped recipes or studies by name, such as "demo" or
    "papers/rapo-web-qwen2.5-7b"; "sokoban" is that of an example environment, which lies beside
    it."""
    folder = shipped(FOLDERS[kind])
    found = {
        path.relative_to(folder).as_posix().removesuffix(".toml"): path
        for path in folder.glob(_PATTERNS[kind])
    }
    if kind == "recipe":
        worlds = shipped("examples") / "environments"
        found |= {path.stem: path for path in worlds.glob("*.toml")}
    return dict(sorted(found.items()))


def names_recipe(text: str) -> bool:
    """Returns whether a text of the command line names a recipe, and no folder."""
    path = Path(text).expanduser()
    is_recipe = path.suffix in (".toml", ".json") or text in shipped_recipes()
    # A run folder may have the name of a recipe.
    return is_recipe and not path.is_dir()


def shipped_recipes() -> dict[str, Path]:
    """Returns the shipped recipes by name."""
    return by_name("recipe")
