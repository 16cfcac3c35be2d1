"""Options that have no effect beside or without others."""

from __future__ import annotations

import typer

from treegraft.core.errors import SettingError


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
