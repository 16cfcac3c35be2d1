"""Commands that extensions bring, beside those of the core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from treegraft.core.import_paths import load_object
from treegraft.core.registry import Entry, registered_with_commands


class Plugged(TyperGroup):
    """A group of commands, then those of extensions."""

    prefix: ClassVar[str] = ""
    """What the names of extensions' commands in this group begin with, such as "eval "."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Returns the names of all commands."""
        return [*super().list_commands(ctx), *self._plugged()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns a command as the list of commands shows it; `resolve_command` loads it."""
        plugged = self._plugged().get(cmd_name)
        if plugged is None:
            return super().get_command(ctx, cmd_name)
        # Its module is not imported: the list of commands must not wait for torch.
        return TyperCommand(cmd_name, help=plugged.facts["help"])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Returns the name, the command and the words after it."""
        plugged = self._plugged().get(args[0] if args else "")
        if plugged is None:
            return super().resolve_command(ctx, args)
        return args[0], loaded_command(args[0], plugged.value), args[1:]

    def _plugged(self) -> Mapping[str, Entry]:
        found = {
            name.removeprefix(self.prefix): one
            for name, one in registered_with_commands("command").items()
            if name.startswith(self.prefix)
        }
        return {name: one for name, one in found.items() if " " not in name}


def loaded_command(name: str, path: str) -> Any:
    """The command of an extension, from a typer function or a `typer.Typer`."""
    found = load_object(path)
    if not isinstance(found, typer.Typer):
        alone = typer.Typer(
            add_completion=False,
            rich_markup_mode=None,
            context_settings={"help_option_names": ["-h", "--help"]},
        )
        alone.command(name)(found)
        found = alone
    return typer.main.get_command(found)
