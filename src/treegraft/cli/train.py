"""`treegraft train` and `treegraft sft`: runs of a recipe, or runs gone on with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treegraft.cli.options import Overrides, Smoke, complete_recipe, complete_run, refuse_idle
from treegraft.core.errors import DataError, ModelError, SettingError
from treegraft.runs.display import display_on

if TYPE_CHECKING:
    from treegraft.settings.config import Config

RecipeOrResume = Annotated[
    str | None,
    typer.Argument(
        metavar="[RECIPE]",
        autocompletion=complete_recipe,
        help="Recipe (.toml or name of a shipped one) or config.json of a run; not with --resume.",
    ),
]
Resume = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN_DIR",
        autocompletion=complete_run,
        help="Run folder to continue from its latest checkpoint.",
    ),
]
AcceptChanges = Annotated[
    bool | None,
    typer.Option(
        "--accept-changes",
        help="With --resume: go on although metrics, evaluations or the buffer have changed.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAsked:
    """What a command line asks for: a run of a recipe, or one to go on with."""

    config: Config
    recipe: str | None
    """None for that of the run to resume."""
    overrides: list[str]
    resume: Path | None
    accepts_changes: bool
    is_smoke: bool

    @property
    def start_words(self) -> list[str]:
        """The words of a command line that ask for the same run, overrides left out."""
        if self.resume is None:
            return [str(self.recipe), *(["--smoke"] if self.is_smoke else [])]
        return ["--resume", str(self.resume), *self.accept_words]

    @property
    def accept_words(self) -> list[str]:
        """The option that accepts changes, where it was given."""
        return ["--accept-changes"] if self.accepts_changes else []

    def run_dir(self) -> Path:
        """Returns the folder of the run: a new one, or that of the run to resume."""
        if self.resume is not None:
            return self.resume
        from treegraft.runs.start import new_start

        return new_start(self.config, self.recipe).path

    @contextlib.contextmanager
    def carried_out(self) -> Iterator[dict[str, Any]]:
        """Yields the arguments of `treegraft.train.train` but for the settings; errors of data,
        models and parts in the block say which setting they come from."""
        from treegraft.settings.load import traced

        try:
            with display_on(None) as display:
                yield {
                    "recipe": self.recipe,
                    "resume": self.resume,
                    "accepts_changes": self.accepts_changes,
                    "display": display,
                }
        except (SettingError, DataError, ModelError) as error:
            said = traced(error, self.recipe or str(self.resume), self.overrides)
            raise type(error)(said, settings=error.settings) from error


def _asked(
    context: typer.Context,
    recipe: str | None,
    overrides: list[str] | None,
    resume: Path | None,
    accept_changes: bool | None,
    smoke: bool | None,
) -> RunAsked:
    if resume is None:
        refuse_idle(context, "without --resume", "--accept-changes")
    else:
        refuse_idle(context, "with --resume", "--smoke")
    typed = overrides or []
    if resume is not None and recipe is not None and "=" in recipe:
        # What stands in the recipe's place is the first override.
        typed = [recipe, *typed]
        recipe = None
    return RunAsked(
        config=_settings(recipe, typed, resume, str(context.info_name), smoke),
        recipe=recipe,
        overrides=typed,
        resume=resume,
        accepts_changes=bool(accept_changes),
        is_smoke=bool(smoke),
    )


def _settings(
    recipe: str | None, overrides: list[str], resume: Path | None, command: str, smoke: bool | None
) -> Config:
    """Returns the settings of a recipe, or those of the run to resume, with overrides."""
    from treegraft.settings.load import load_config, refuse_foreign

    refuse_foreign(overrides, command)
    if resume is not None and recipe is None:
        from treegraft.runs.start import own_config

        return own_config(resume, overrides)
    if recipe is None:
        raise SettingError(
            f"command line: `treegraft {command}` got neither a recipe nor a run to resume;"
            f" expected one of them, such as `treegraft {command} demo` or `treegraft {command}"
            f" --resume runs/NAME`."
        )
    return load_config(recipe, overrides, smoke=bool(smoke))


def run_command(work: Callable[[RunAsked], None]) -> Callable[..., None]:
    """Returns a command that begins runs or goes on with them, with the arguments and options of
    `treegraft train`; it is described as `work` is."""

    def command(
        context: typer.Context,
        recipe: RecipeOrResume = None,
        overrides: Overrides = None,
        resume: Resume = None,
        accept_changes: AcceptChanges = None,
        smoke: Smoke = None,
    ) -> None:
        work(_asked(context, recipe, overrides, resume, accept_changes, smoke))

    command.__name__, command.__doc__ = work.__name__, work.__doc__
    return command


@run_command
def train(asked: RunAsked) -> None:
    """Train an agent with a recipe.

    Writes a run folder with metrics, trees and checkpoints.
    """
    # After the settings are checked: it loads torch, which takes seconds.
    from treegraft.train import train as run_training

    with asked.carried_out() as arguments:
        run_training(asked.config, **arguments)


@run_command
def sft(asked: RunAsked) -> None:
    """Run only the supervised warm-up of a recipe, its table [warmup].

    It imitates the tasks' expert, or with warmup.traces=FILE a buffer or a JSONL file.
    """
    if asked.config.warmup.num_steps == 0:
        raise SettingError(
            f"{asked.recipe or asked.resume}: warmup.num_steps is 0, so there is nothing to"
            " fine-tune; add warmup.num_steps=300."
        )
    from treegraft.train import sft as run_fine_tuning

    with asked.carried_out() as arguments:
        run_fine_tuning(asked.config, **arguments)
