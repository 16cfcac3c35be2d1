"""`treegraft config`: settings with their values and meanings."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treegraft.cli.commands import AsJson, complete_recipe, complete_setting, refuse_idle
from treegraft.core.errors import SettingError
from treegraft.core.shipped import shipped_recipes

if TYPE_CHECKING:
    from treegraft.settings.load import SettingRow


def _complete(incomplete: str) -> list[str]:
    """Recipes, tables and settings, for the shell."""
    from treegraft.settings.config import tables_and_settings

    tables = [name for name, entry in tables_and_settings().items() if entry.table is not None]
    fitting = [name for name in tables if name.startswith(incomplete)]
    return [*complete_recipe(incomplete), *fitting, *complete_setting(incomplete)]


def show_config(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [TABLE | OVERRIDE]...",
            autocompletion=_complete,
            help="A recipe, tables or settings to print, e.g. learn or eval.top_p, and settings to"
            " change, e.g. learn.lr=1e-5; or metrics, e.g. learn/entropy.",
        ),
    ] = None,
    as_json: AsJson = False,
    as_toml: Annotated[
        bool | None, typer.Option("--toml", help="Print a complete recipe with comments.")
    ] = None,
) -> None:
    """Print settings with their meanings: the defaults, or those of a recipe.

    A * marks values that differ from the default.
    """
    from treegraft.runs.metrics import find_meaning
    from treegraft.settings.config import Config
    from treegraft.settings.load import config_json, load_config, setting_rows

    if as_json:
        refuse_idle(context, "with --json", "--toml")
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
    if as_toml:
        print("\n".join(recipe_lines(rows)))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console()
    width = max(20, min(console.width, 100) - 4)
    for _, group in groupby(rows, key=lambda row: row.name.partition(".")[0]):
        for row in group:
            value = "none" if row.value is None else toml_value(row.value)
            mark, style = ("", "bold") if row.is_default else (" *", "bold cyan")
            console.print(Text(f"{row.name} = {value}{mark}", style), soft_wrap=True)
            console.print(Text(textwrap.indent(textwrap.fill(row.meaning, width), "    "), "dim"))
        console.print()


def _sorted_out(words: Sequence[str]) -> tuple[str | None, list[str], list[str]]:
    """Returns the recipe, the overrides, and the tables and settings to print."""
    from treegraft.settings.config import tables_and_settings

    recipe, overrides, chosen = None, [], []
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


def recipe_lines(rows: Sequence[SettingRow]) -> Iterator[str]:
    """Yields the lines of a recipe with these settings; one that is None is left out, as TOML has
    no word for it."""
    tables: dict[str, list[SettingRow]] = {}
    for row in rows:
        tables.setdefault(row.name.rpartition(".")[0], []).append(row)
    for table, group in tables.items():
        if table:
            yield f"[{table}]"
        for row in group:
            last = row.name.rpartition(".")[2]
            line = f"# {last} is none" if row.value is None else f"{last} = {toml_value(row.value)}"
            yield textwrap.fill(row.meaning, 78, initial_indent="# ", subsequent_indent="# ")
            yield line
        yield ""


def toml_value(value: Any) -> str:
    """Returns a value of a setting as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for one control character.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, dict):
        pairs = (f"{toml_value(key)} = {toml_value(one)}" for key, one in value.items())
        return f"{{{', '.join(pairs)}}}"
    if hasattr(value, "model_dump"):
        return toml_value(value.model_dump(mode="json", exclude_none=True))
    return repr(value)
