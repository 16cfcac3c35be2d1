"""Options, lines and tables that several commands share."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from treegraft.core.errors import SettingError

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON only.")]

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[OVERRIDES]...", help="Settings to change, e.g. rollout.max_tool_calls=3."
    ),
]


def refuse_idle(context: typer.Context, where: str, *names: str) -> None:
    """Raises SettingError for the first of the named options that was given.

    Args:
        where: the condition, such as "without --suite".
        names: options and arguments as a person types them; one that is None was not given.
    """
    for parameter in context.command.params:
        name = parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.opts[0].upper()
        if name in names and context.params[parameter.name or ""] is not None:
            raise SettingError(f"command line: {name} would have no effect {where}; leave it out.")


def say(text: str, style: str = "", *, to_stderr: bool = False) -> None:
    """Prints text as it is, unwrapped, so that paths and commands can be copied."""
    Console(stderr=to_stderr).print(Text(text, style), soft_wrap=True)


def table(*columns: str, num_left: int = 1, **options: Any) -> Table:
    """Returns an empty table without lines, its first `num_left` columns aligned to the left."""
    made = Table(box=None, header_style="dim", **({"padding": (0, 1)} | options))
    for number, name in enumerate(columns):
        made.add_column(Text(name), justify="left" if number < num_left else "right")
    return made
