"""`treegraft config`: settings with their values and meanings."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from treegraft.cli.commands import AsJson
from treegraft.core.errors import SettingError
from treegraft.core.shipped import shipped_recipes

SUFFIXES = (".toml", ".json")
"""Of recipes, and of the settings of a run."""


def show_config(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [TABLE | OVERRIDE]...",
            help="A recipe, tables or settings to print, e.g. learn or eval.top_p, and settings to"
            " change, e.g. learn.lr=1e-5; or metrics, e.g. learn/entropy.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print settings with their meanings: the defaults, or those of a recipe.

    A * marks values that differ from the default.
    """
    from treegraft.runs.metrics import find_meaning
    from treegraft.settings.config import Config
    from treegraft.settings.load import config_json, load_config, setting_rows

    if words and all(not Path(word).exists() and find_meaning(word) for word in words):
        for word in words:
            print(f"{word}: {find_meaning(word)}")
        return
    recipe, overrides, chosen = _sorted_out(words or [])
    config = load_config(recipe if recipe is not None else Config(), overrides)
    if as_json:
        print(config_json(config), end="")
        return
    rows = [row for row in setting_rows(config) if not chosen or _is_below(row.name, chosen)]
    from rich.console import Console
    from rich.text import Text

    console = Console()
    width = max(20, min(console.width, 100) - 4)
    for row in rows:
        mark, style = ("", "bold") if row.is_default else (" *", "bold cyan")
        console.print(Text(f"{row.name} = {_shown(row.value)}{mark}", style), soft_wrap=True)
        console.print(Text(textwrap.indent(textwrap.fill(row.meaning, width), "    "), "dim"))


def _sorted_out(words: Sequence[str]) -> tuple[str | None, list[str], list[str]]:
    """Returns the recipe, the overrides, and the tables and settings to print."""
    from treegraft.settings.config import tables_and_settings
    from treegraft.settings.unknown import suggestion

    known = set()
    for name in tables_and_settings():
        # Settings may be called by the last part of their names.
        known |= {name, name.rpartition(".")[2]}
    recipe = None
    overrides = []
    chosen = []
    for word in words:
        if "=" in word:
            overrides.append(word)
        elif word.rstrip(".") in known:
            chosen.append(word.rstrip("."))
        elif word == words[0] and (word in shipped_recipes() or Path(word).suffix in SUFFIXES):
            recipe = word
        else:
            raise SettingError(
                f"command line: '{word}' is neither a recipe nor a table or setting."
                f"{suggestion(word)} `treegraft config` alone prints all settings.",
                code="config-word-unknown",
            )
    return recipe, overrides, chosen


def _is_below(name: str, chosen: Sequence[str]) -> bool:
    return any(f"{name}.".startswith(f"{one}.") or name.endswith(f".{one}") for one in chosen)


def _shown(value: Any) -> str:
    """A value as a recipe has it."""
    if value is None:
        return "none"
    return json.dumps(
        value,
        ensure_ascii=False,
        default=lambda table: table.model_dump(mode="json", exclude_none=True),
    )
