"""`treegraft train` and `treegraft sft`: runs of a recipe, or runs gone on with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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


def _settings(
    recipe: str | None,
    overrides: list[str],
    resume: Path | None,
    command: str,
    smoke: bool | None = None,
) -> Config:
    """Returns the settings of a recipe, or those of the run to resume, with overrides."""
    from treegraft.settings.load import load_config, refuse_off_cluster

    if command != "cluster":
        refuse_off_cluster(overrides, command)
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


def _typed(
    recipe: str | None, overrides: list[str] | None, resume: Path | None
) -> tuple[str | None, list[str]]:
    """Returns the recipe, None for that of the run to resume, and the overrides."""
    if resume is not None and recipe is not None and "=" in recipe:
        # What stands in the recipe's place is the first override.
        return None, [recipe, *(overrides or [])]
    return recipe, overrides or []


@contextlib.contextmanager
def _traced(origin: str, overrides: list[str]) -> Iterator[None]:
    """Lets errors of data, models and parts say which setting they come from."""
    from treegraft.settings.load import traced

    try:
        yield
    except (SettingError, DataError, ModelError) as error:
        said = traced(error, origin, overrides)
        raise type(error)(said, settings=error.settings) from error


def train(
    context: typer.Context,
    recipe: RecipeOrResume = None,
    overrides: Overrides = None,
    resume: Resume = None,
    accept_changes: AcceptChanges = None,
    smoke: Smoke = None,
) -> None:
    """Train an agent with a recipe.

    Writes a run folder with metrics, trees and checkpoints.
    """
    if resume is None:
        refuse_idle(context, "without --resume", "--accept-changes")
    else:
        refuse_idle(context, "with --resume", "--smoke")
    recipe, typed = _typed(recipe, overrides, resume)
    config = _settings(recipe, typed, resume, "train", smoke)
    # After the settings are checked: it loads torch, which takes seconds.
    from treegraft.train import train as run_training

    with _traced(recipe or str(resume), typed), display_on(None) as display:
        run_training(
            config,
            recipe=recipe,
            resume=resume,
            accepts_changes=bool(accept_changes),
            display=display,
        )


def sft(
    context: typer.Context,
    recipe: RecipeOrResume = None,
    overrides: Overrides = None,
    resume: Resume = None,
    accept_changes: AcceptChanges = None,
    smoke: Smoke = None,
) -> None:
    """Run only the supervised warm-up of a recipe, its table [warmup].

    It imitates the tasks' expert, or with warmup.traces=FILE a buffer or a JSONL file.
    """
    if resume is None:
        refuse_idle(context, "without --resume", "--accept-changes")
    else:
        refuse_idle(context, "with --resume", "--smoke")
    recipe, typed = _typed(recipe, overrides, resume)
    config = _settings(recipe, typed, resume, "sft", smoke)
    if config.warmup.num_steps == 0:
        raise SettingError(
            f"{recipe or resume}: warmup.num_steps is 0, so there is nothing to fine-tune; add"
            " warmup.num_steps=300."
        )
    from treegraft.train import sft as run_fine_tuning

    with _traced(recipe or str(resume), typed), display_on(None) as display:
        run_fine_tuning(
            config,
            recipe=recipe,
            resume=resume,
            accepts_changes=bool(accept_changes),
            display=display,
        )


def cluster(
    context: typer.Context,
    recipe: RecipeOrResume = None,
    overrides: Overrides = None,
    resume: Resume = None,
    accept_changes: AcceptChanges = None,
    smoke: Smoke = None,
) -> None:
    """Train an agent with a recipe on a Ray cluster, as its table [cluster] says.

    The run folder, and the trees in it, are those of `treegraft train`.
    """
    if resume is None:
        refuse_idle(context, "without --resume", "--accept-changes")
    else:
        refuse_idle(context, "with --resume", "--smoke")
    recipe, typed = _typed(recipe, overrides, resume)
    config = _settings(recipe, typed, resume, "cluster", smoke)
    # What a rank goes on with is what it began with, but for the recipe.
    accepted = ["--accept-changes"] if accept_changes else []
    began = [str(recipe), *(["--smoke"] if smoke else [])]
    asked = began if resume is None else ["--resume", str(resume), *accepted]
    with _traced(recipe or str(resume), typed), display_on(None) as display:
        from treegraft.cluster.command import run_on_cluster

        code = run_on_cluster(
            config,
            recipe=recipe,
            resume=resume,
            accepts_changes=bool(accept_changes),
            begin=["cluster", *asked, *typed],
            again=[] if resume is None else [*accepted, *typed],
            display=display,
        )
    if code:
        raise typer.Exit(code)
