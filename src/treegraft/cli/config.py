"""`treegraft config`: settings with their values and meanings."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer

from treegraft.cli.commands import AsJson
from treegraft.core.errors import SettingError
from treegraft.core.shipped import shipped_recipes


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
    for _, group in groupby(rows, key=lambda row: row.name.partition(".")[0]):
        for row in group:
            mark, style = ("", "bold") if row.is_default else (" *", "bold cyan")
            console.print(Text(f"{row.name} = {_shown(row.value)}{mark}", style), soft_wrap=True)
            console.print(Text(textwrap.indent(textwrap.fill(row.meaning, width), "    "), "dim"))
        console.print()


def _sorted_out(words: Sequence[str]) -> tuple[str | None, list[str], list[str]]:
    """Returns the recipe, the overrides, and the tables and settings to print."""
    from treegraft.settings.config import tables_and_settings

    recipe = None
    overrides = []
    chosen = []
    for number, word in enumerate(words):
        name = word.rstrip(".")
        is_setting = name in tables_and_settings() or any(
            known.rpartition(".")[2] == name for known in tables_and_settings()
        )
        if "=" in word:
            overrides.append(word)
        elif number == 0 and (Path(word).is_file() or word in shipped_recipes() or not is_setting):
            # What looks like the name of a setting is not a recipe that is missing.
            if not any(sign in word for sign in "./\\") and word not in shipped_recipes():
                _refuse_unknown(word)
            recipe = word
        elif is_setting:
            chosen.append(name)
        else:
            _refuse_unknown(word)
    return recipe, overrides, chosen


def _refuse_unknown(word: str) -> None:
    from treegraft.settings.unknown import suggestion

    if not Path(word).is_file():
        raise SettingError(
            f"command line: '{word}' is neither a recipe nor a table or setting."
            f"{suggestion(word)} `treegraft config` alone prints all settings.",
            code="config-word-unknown",
        )


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
