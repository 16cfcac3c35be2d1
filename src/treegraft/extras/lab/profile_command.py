"""`treegraft profile`: where the time of an update goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from treegraft import SettingError, load_config
from treegraft.parts import commands


def profile(
    context: typer.Context,
    recipe: Annotated[
        str,
        typer.Argument(metavar="RECIPE|RUN", help="A recipe, or a run folder that holds spans."),
    ],
    overrides: commands.Overrides = None,
    updates: Annotated[
        int,
        typer.Option(
            min=1, help="Number of updates to measure, after a warm-up that is not counted."
        ),
    ] = 3,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="File to write the machine and the rows to."),
    ] = None,
) -> None:
    """Run a few updates of a recipe and print the time of each part.

    Evaluations are skipped, and the run is not kept. Given a run folder with spans
    (track.spans=file), it prints what each process of the run did, also for several ranks and
    clusters.
    """
    if Path(recipe).is_dir():
        from treegraft.extras.lab.profile_spans import print_spent

        commands.refuse_idle(
            context, "with a run folder, whose updates are measured already", "--updates"
        )
        if overrides:
            raise SettingError(
                f"command line: got {' '.join(overrides)} beside the run folder '{recipe}', whose"
                " updates are measured already; leave the settings out, or measure anew: treegraft"
                f" profile {Path(recipe) / 'config.json'} {' '.join(overrides)}",
                code="settings-beside-run",
            )
        print_spent(Path(recipe), json_file)
        return
    from treegraft.extras.lab.profile import print_profile

    print_profile(load_config(recipe, overrides or []), updates, json_file)
