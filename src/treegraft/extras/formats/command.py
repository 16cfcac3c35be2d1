"""`treegraft export`: the trees of a run as evaluation logs of Inspect."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from treegraft import DataError
from treegraft.extras.formats.inspect import write_log
from treegraft.parts import RunReader, plain


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder to write to. Default: RUN/export."),
    ] = None,
) -> None:
    """Write the trees of a run as evaluation logs of Inspect, for `inspect view`.

    Each update and evaluation is a log; a sample is a task, an epoch one of its leaves.
    """
    reader = RunReader(run)
    if not (parts := reader.files()):
        raise DataError(
            f"{run}: it has no trees; expected a run folder with trees in it (track.record_trees).",
            code="no-trees-to-export",
        )
    model = str(reader.config().get("model", {}).get("path", "unknown"))
    if model.startswith("/"):
        # A viewer's heading has room for a hub's id: run, "checkpoints" and update.
        model = "/".join(Path(model).parts[1:][-3:])
    folder = out or run / "export"
    folder.mkdir(parents=True, exist_ok=True)
    for part in parts:
        trees = [*part.trees()]
        path = folder / f"{part.name}.eval"
        when = datetime.fromtimestamp(part.mtime_ns / 1e9, UTC)
        name = f"{run.resolve().name}-{part.name}"
        write_log(path, trees, model=f"treegraft/{model}", name=name, when=when)
        typer.echo(plain(f"{sum(len(tree.leaves) for tree in trees)} trajectories: {path}"))
