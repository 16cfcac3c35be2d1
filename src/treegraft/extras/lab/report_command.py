"""`treegraft report`: figures of runs on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from treegraft.parts import plain


def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...", help="Run folders or studies (.jsonl), each as PATH or LABEL=PATH."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder to write to. Default: the first run's folder."),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(metavar="LABEL", help="Group that the others are compared with.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="FIGURE", help="Draw only this figure; may be repeated."),
    ] = None,
) -> None:
    """Write a report of runs: report.html and figures/.

    Runs that differ only in name and seed form one group, drawn with 95 % intervals.
    """
    from treegraft.extras.lab.report.command import report_folder, write_report
    from treegraft.extras.lab.report.records import read_records

    place = report_folder(runs, out)
    written = write_report(read_records(runs), place, baseline=baseline, only=only or ())
    for line in (*written.notes, *written.left_out):
        print(plain(line))
    names = f" ({', '.join(written.figures)})" if written.figures else ""
    print(plain(f"{written.page}: {len(written.figures)} figures{names}"))
