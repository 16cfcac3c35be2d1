"""`treegraft verl-data` and `treegraft verl-args`: what verl reads, from a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from treegraft import DataError, Session, Task, load_config
from treegraft.extras.verl.arguments import arguments, check_recipe
from treegraft.extras.verl.keeper import KeptBuffer, no_engine
from treegraft.parts import commands, packages

Recipe = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe: a .toml file, or a shipped one's name.")
]


def verl_data(
    recipe: Recipe,
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="Parquet file of the training tasks.")
    ],
    held_out: Annotated[
        Path | None,
        typer.Option("--held-out", metavar="FILE", help="Parquet file of the held-out tasks."),
    ] = None,
    settings: commands.Overrides = None,
) -> None:
    """Write a recipe's tasks as the parquet files that verl reads.

    A row has the question, its reference and the task's id, by which verl's workers find the task
    again in the recipe.
    """
    packages.require("treegraft verl-data", "pyarrow")
    config = load_config(recipe, settings or ())
    check_recipe(config)
    # Every prompt is written once, so that one that cannot be is found here.
    session = Session(config, engine=no_engine(), retriever=KeptBuffer(None), learns=False)
    with session:
        parts = session.parts
        for path, tasks in ((out, parts.train_tasks), (held_out, parts.eval_tasks)):
            if path is not None:
                write_tasks(path, tasks)
                typer.echo(f"{len(tasks)} tasks: {path}")


def write_tasks(path: Path, tasks: Sequence[Task]) -> None:
    """Writes one row for each task.

    Raises:
        DataError: no task, or the file cannot be written.
    """
    import pyarrow
    from pyarrow import parquet

    if not tasks:
        raise DataError(
            f"{path}: the recipe has no such task; expected at least one.", code="verl-no-task"
        )
    table = pyarrow.Table.from_pylist([task_row(n, task) for n, task in enumerate(tasks)])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(table, path)
    except OSError as error:
        raise DataError(
            f"{path}: it cannot be written ({error}).", code="verl-file-unwritable"
        ) from error


def task_row(number: int, task: Task) -> dict[str, Any]:
    """Returns verl's columns of a task. The prompt is the question alone: trees write their own by
    the recipe's [format]."""
    return {
        "data_source": task.category or "treegraft",
        "prompt": [{"role": "user", "content": task.question}],
        "ability": "",
        "reward_model": {"style": "rule", "ground_truth": "; ".join(task.reference)},
        "extra_info": {"index": number, "treegraft": task.id},
    }


def verl_args(
    recipe: Recipe,
    settings: commands.Overrides = None,
) -> None:
    """Print the arguments of verl that a recipe gives, one a line.

    python -m verl.trainer.main_ppo $(treegraft verl-args agent.toml) data.train_files=...
    """
    path = Path(recipe)
    where = path.absolute() if path.exists() else recipe
    for line in arguments(where, settings or ()):
        typer.echo(line)
