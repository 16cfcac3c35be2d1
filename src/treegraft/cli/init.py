"""`treegraft init`: a folder with data, a tool, a reward, a recipe and a test, ready to train."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Annotated

import typer

from treegraft.cli.commands import say
from treegraft.core.errors import SettingError
from treegraft.core.shipped import shipped

Name = Annotated[Path, typer.Argument(metavar="NAME", help="Folder to make.")]


def init(name: Name) -> None:
    """Make a project: data, a tool, a reward, a recipe and a test.

    Train it unchanged, then replace its parts with your own. chat.toml is its recipe for a language
    model.
    """
    if name.exists() and (not name.is_dir() or any(name.iterdir())):
        raise SettingError(
            f"command line: '{name}' exists and is not an empty folder; expected a new name.",
            code="folder-taken",
        )
    others = shutil.ignore_patterns("__pycache__", ".*", "runs")
    shutil.copytree(shipped("examples") / "project", name, ignore=others, dirs_exist_ok=True)
    for path in sorted(path for path in name.rglob("*") if path.is_file()):
        say(f"  {path}")
    folder = shlex.quote(str(name))
    say(f"next: cd {folder} && treegraft doctor recipe.toml && treegraft train recipe.toml")
