"""`treegraft export`: the trees of a run in the format of another project."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from treegraft import DataError, SettingError
from treegraft.extras.formats.inspect import write_log
from treegraft.extras.formats.verifiers import write_traces
from treegraft.parts import RunReader, plain

FORMATS = {"inspect": ".eval", "verifiers": ".jsonl"}
"""What there is, and how the names of its files end."""


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help="inspect or verifiers.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder to write to. Default: RUN/export/FORMAT."),
    ] = None,
) -> None:
    """Write the trees of a run in the format of another project.

    inspect: an evaluation log of each update and evaluation; a sample is a task, an epoch one of
    its leaves. `inspect view` shows it.
    verifiers: a line for each leaf, a trace with messages, tokens and advantages.
    """
    if to not in FORMATS:
        raise SettingError(
            f"--to: got '{to}', expected one of {', '.join(FORMATS)}.", code="unknown-export-format"
        )
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
    folder = out or run / "export" / to
    folder.mkdir(parents=True, exist_ok=True)
    for part in parts:
        trees, path = [*part.trees()], folder / f"{part.name}{FORMATS[to]}"
        when = datetime.fromtimestamp(part.mtime_ns / 1e9, UTC)
        if to == "inspect":
            name = f"{run.resolve().name}-{part.name}"
            write_log(path, trees, model=f"treegraft/{model}", name=name, when=when)
        else:
            write_traces(path, trees, model=model, when=when)
        typer.echo(plain(f"{sum(len(tree.leaves) for tree in trees)} trajectories: {path}"))
