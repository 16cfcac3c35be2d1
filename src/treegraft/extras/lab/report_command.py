"""`treegraft report`: figures of runs on one page, and case studies beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from treegraft.parts import commands, plain


def report(
    context: typer.Context,
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
    cases: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Also write cases.html: N held-out questions on which the runs differ, or the"
            " first and last evaluation of one run.",
        ),
    ] = None,
    at: Annotated[
        list[int] | None,
        typer.Option(
            metavar="UPDATE",
            min=0,
            help="With --cases: compare the evaluation after this update; may be repeated.",
        ),
    ] = None,
) -> None:
    """Write a report of runs: report.html and figures/.

    Runs that differ only in name and seed form one group, drawn with 95 % intervals.
    """
    from treegraft.extras.lab.report.command import write_report
    from treegraft.extras.lab.report.records import split_label

    if cases is None:
        commands.refuse_idle(context, "without --cases", "--at")
        found, beside = None, {}
    else:
        from treegraft.extras.lab.report.cases import PAGE, compare, write_cases

        found = compare([*map(split_label, runs)], cases, at or ())
        beside = {PAGE: "Case studies"}
    written = write_report(runs, out=out, baseline=baseline, only=only or (), beside=beside)
    for line in (*written.notes, *written.left_out):
        print(plain(line))
    names = f" ({', '.join(written.figures)})" if written.figures else ""
    print(plain(f"{written.page}: {len(written.figures)} figures{names}"))
    if found is not None:
        write_cases(found, written.page.with_name(PAGE))
        print(plain(f"{written.page.with_name(PAGE)}: {found.summary}"))
