"""Builds the documentation: the pages of this folder, and references made from the code.

    python docs/build.py [FOLDER]      # build/docs where none is given; the site is FOLDER/site

A line `<!-- include: PATH -->` in a page is replaced by that file: code in a block, a drawing as it
is. Nothing is fetched, and a warning of the site's builder (a link or an anchor that leads nowhere,
a page without a place) fails the build.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs"
INCLUDE = re.compile(r"^<!-- include: (\S+) -->$", re.M)

SETTINGS_HEAD = """# Settings

Every setting of a recipe, made from the declarations in `src/treegraft/settings/`. `treegraft config RECIPE` prints those of one recipe. On the command
line a setting is named with its table, such as `learn.lr=1e-5`; its last part will do where only one setting has it. Naming one
there that would do nothing beside the others is an error."""
METRICS_HEAD = """# Metrics

The keys of `metrics.jsonl`, made from `src/treegraft/runs/metrics.py`: one line for each update, flat. `num_` counts, `_frac` is 0..1,
`_s` seconds; names in braces stand for what a recipe decides. `time/*` is outside all promises of reproducibility."""
NAMES_HEAD = """# Names of other frameworks

What TRL and verl call a setting, and what it is called here, made from the declarations in `src/treegraft/settings/`. An error for an unknown setting
names ours where one of theirs was typed.

| there | here |
|---|---|"""
COMMANDS_HEAD = """# Commands

Made from the program itself: `treegraft COMMAND --help` prints the same. Exit codes: 0 done; 1 failed while working; 2 something to
correct first (settings, data, model, usage); 3 a checkpoint or run folder that cannot be used; 130 stopped with Ctrl-C."""


def stage(folder: Path) -> None:
    """Writes what the site's builder reads into `folder`, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    place = folder / "docs"
    shutil.copytree(PAGES, place, ignore=shutil.ignore_patterns("*.py", "*.toml", "__pycache__"))
    shutil.copy(PAGES / "zensical.toml", folder)
    for page in place.rglob("*.md"):
        page.write_text(INCLUDE.sub(included, page.read_text(encoding="utf-8")), encoding="utf-8")
    (place / "reference").mkdir(exist_ok=True)
    for name, text in references().items():
        (place / "reference" / f"{name}.md").write_text(text, encoding="utf-8")


def included(found: re.Match[str]) -> str:
    """Returns the file that a line names, as a page shows it."""
    path = ROOT / found[1]
    text = path.read_text(encoding="utf-8").rstrip()
    if path.suffix == ".svg":
        return f'<div class="drawing">{text}</div>'  # in a block, which Markdown leaves as it is
    return f'```{path.suffix[1:]} title="{found[1]}"\n{text}\n```'


def references() -> dict[str, str]:
    """Returns the pages that are made from the code, by name."""
    return {
        "settings": settings_page(),
        "metrics": metrics_page(),
        "commands": commands_page(),
        "names": names_page(),
    }


# --- settings -------------------------------------------------------------------------------------


def settings_page() -> str:
    """Returns every setting with its type, default and meaning, a table for each table of a
    recipe."""
    from treegraft.settings.config import Config, known_settings
    from treegraft.settings.load import describe

    known = known_settings()
    lines = [SETTINGS_HEAD]
    tables: dict[str, list[str]] = {}
    for row in describe(Config()):
        table, _, name = row.name.rpartition(".")
        default = "none" if row.value is None else json.dumps(row.value, ensure_ascii=False)
        kind = type_name(known[row.name].field.annotation)
        tables.setdefault(table, []).append(
            f"| `{name}` | {code(kind)} | {code(default)} | {cell(row.meaning)} |"
        )
    for table, rows in tables.items():
        lines += [
            "",
            f"## [{table}]",
            "",
            "| setting | type | default | meaning |",
            "|---|---|---|---|",
            *rows,
        ]
    return "\n".join(lines) + servers_table() + "\n"


def servers_table() -> str:
    """Returns the table of what one entry of tools.mcp holds: a table inside a list has no dotted
    name."""
    from treegraft.settings.tools import McpSettings

    rows = [
        "",
        "",
        "## An entry of tools.mcp",
        "",
        "| setting | type | default | meaning |",
        "|---|---|---|---|",
    ]
    for name, field in McpSettings.model_fields.items():
        default = "required" if field.is_required() else code(json.dumps(field.default))
        rows.append(
            f"| `{name}` | {code(type_name(field.annotation))} | {default} |"
            f" {cell(field.description or '')} |"
        )
    return "\n".join(rows)


def type_name(annotation: Any) -> str:
    """Returns a type as a reader of recipes says it: texts, numbers, one of several names."""
    is_plain = isinstance(annotation, type) and not hasattr(annotation, "__args__")
    text = annotation.__name__ if is_plain else str(annotation)
    text = re.sub(r"typing\.Annotated\[(\w+), .*?\]\)\]", r"\1", text)
    text = re.sub(
        r"typing\.Literal\[(.*?)\]",
        lambda found: found[1].replace("'", '"').replace(", ", " or "),
        text,
    )
    text = re.sub(r"(?:\w+\.)+(\w+)", r"\1", text)
    for python, plain in (
        ("str", "text"),
        ("int", "integer"),
        ("float", "number"),
        ("bool", "true or false"),
        ("None", "none"),
    ):
        text = re.sub(rf"\b{python}\b", plain, text)
    return text.replace("NoneType", "none").replace(" | ", " or ")


# --- metrics --------------------------------------------------------------------------------------


def metrics_page() -> str:
    """Returns every metric with its meaning, a table for each group."""
    from treegraft.runs.metrics import METRICS

    groups: dict[str, list[str]] = {}
    for key, meaning in METRICS.items():
        group = key.partition("/")[0] if "/" in key else "run"
        groups.setdefault(group, []).append(f"| `{key}` | {cell(meaning)} |")
    lines = [METRICS_HEAD]
    for group, rows in groups.items():
        lines += ["", f"## {group}", "", "| key | meaning |", "|---|---|", *rows]
    return "\n".join(lines) + "\n"


# --- names ----------------------------------------------------------------------------------------


def names_page() -> str:
    """Returns what settings of other frameworks are called here."""
    from treegraft.settings.config import foreign_names

    lines = [NAMES_HEAD]
    for there, here in foreign_names().items():
        ours = " ".join(word if word in ("and", "or") else code(word) for word in here.split())
        lines.append(f"| `{there}` | {ours} |")
    return "\n".join(lines) + "\n"


# --- commands -------------------------------------------------------------------------------------


def commands_page() -> str:
    """Returns every command with its arguments and options."""
    import typer

    from treegraft.cli.main import app

    lines = [COMMANDS_HEAD]
    for name, command in commands(typer.main.get_command(app), "treegraft"):
        lines += ["", f"## {name}", "", *described(name, command)]
    return "\n".join(lines) + "\n"


def commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yields each command that does something, with its whole name."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield name, command
        return
    for last, one in inner.items():
        yield from commands(one, f"{name} {last}")


VALUES = {
    "str": "TEXT",
    "path": "PATH",
    "int": "INTEGER",
    "int range": "INTEGER",
    "float": "NUMBER",
    "float range": "NUMBER",
}


def described(name: str, command: Any) -> list[str]:
    """Returns the lines that describe one command."""
    context = command.context_class(command, info_name=name)
    words, rows = [name], []
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is None:
            continue
        if parameter.param_type_name == "argument":
            shown = parameter.metavar or parameter.name.upper()
            words.append(shown)
        else:
            shown = re.sub(
                r"<([\w ]+)>", lambda found: VALUES.get(found[1], found[1].upper()), record[0]
            )
        rows.append(f"| {code(shown)} | {cell(record[1])} |")
    words[1:1] = ["[OPTIONS]"] if any(p.param_type_name == "option" for p in command.params) else []
    lines = [
        re.sub(r"(?<!\n)\n(?!\n)", " ", (command.help or "").strip()),
        "",
        "```text",
        " ".join(words),
        "```",
    ]
    return lines + (["", "| argument or option | meaning |", "|---|---|", *rows] if rows else [])


# --- writing --------------------------------------------------------------------------------------


def code(text: str) -> str:
    """Returns inline code that may stand in a cell of a table."""
    fence = "``" if "`" in text else "`"
    return f"{fence}{text}{fence}".replace("|", "\\|")


def cell(text: str) -> str:
    """Returns a sentence that may stand in a cell: no line breaks, nothing taken for markup."""
    flat = " ".join(text.split())
    parts = re.split(r"(`[^`]*`)", flat)
    plain = [
        re.sub(r"([\\*_\[\]<>|{}])", r"\\\1", part) if number % 2 == 0 else part
        for number, part in enumerate(parts)
    ]
    return "".join(plain)


def build(folder: Path) -> int:
    """Stages the pages and builds the site; returns the builder's exit code, which is not 0 after
    any warning."""
    stage(folder)
    environment = {**os.environ, "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--clean", "--strict"],
        cwd=folder,
        env=environment,
    ).returncode


if __name__ == "__main__":
    chosen = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "docs"
    outcome = build(chosen)
    if outcome == 0:
        site = (chosen / "site").resolve()
        print(
            f"the pages: {site / 'index.html'}\nwith their search: python -m http.server -b"
            f" 127.0.0.1 -d {site}"
        )
    sys.exit(outcome)
