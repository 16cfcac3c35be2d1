"""Recipes and examples that come with the package: in a wheel, or in the clone it runs from."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

_PACKAGE = Path(__file__).resolve().parents[1]


def shipped(kind: Literal["recipes", "examples"]) -> Path:
    """Returns the folder of the shipped recipes or examples."""
    # A wheel holds them in the package; an editable installation leaves them in the clone.
    installed = _PACKAGE / kind
    return installed if installed.is_dir() else _PACKAGE.parents[1] / kind


def shipped_recipes() -> dict[str, Path]:
    """Returns the shipped recipes by name, such as "demo" or "papers/rapo-web-qwen2.5-7b"."""
    folder = shipped("recipes")
    found = sorted(folder.rglob("*.toml"))
    return {path.relative_to(folder).as_posix().removesuffix(".toml"): path for path in found}
