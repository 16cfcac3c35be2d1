"""`treegraft study`: arms, worlds and pairs of seeds in one command that can be interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from treegraft.cli.machine import machine
from treegraft.cli.options import refuse_idle, say
from treegraft.core.interrupt import Ended


def study(
    context: typer.Context,
    file: Annotated[
        Path, typer.Argument(metavar="STUDY", help="File of a study, e.g. studies/methods.toml.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder of runs and of results.jsonl. Default: runs/NAME, with the results beside"
            " the study, in NAME.jsonl.",
        ),
    ] = None,
    smoke: Annotated[
        bool,
        typer.Option("--smoke", help="With the study's table [smoke]: two pairs of tiny runs."),
    ] = False,
    workers: Annotated[int, typer.Option(min=1, help="Processes, of one thread each.")] = 2,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Begin no run after so many minutes.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Run this arm or world alone; may be repeated."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check the study and count its runs; run nothing.")
    ] = False,
) -> None:
    """Run a study: arms in worlds, in pairs of equal seeds.

    The same command goes on where an earlier one was stopped. Results are one line a run.
    """
    from treegraft.study.plan import make_plan
    from treegraft.study.runner import RESULTS, run_study

    if check:
        refuse_idle(context, "with --check", "--minutes", "--workers", "--out")
    plan = make_plan(file, smoke=smoke, only=only or ())
    if check:
        num_made = len({run.fingerprint for run in plan.runs})
        say(f"{file}: {len(plan.runs)} runs in {plan.study.pairs} pairs, {num_made} to be made")
        return
    place = out or Path("runs") / (f"{file.stem}-smoke" if smoke else file.stem)
    is_beside = out is None and not smoke
    results = file.with_suffix(".jsonl") if is_beside else place / RESULTS
    ran = run_study(
        plan,
        place,
        results,
        workers=workers,
        minutes=minutes,
        facts={"machine": machine(1)},
        say=lambda text: say(text, to_stderr=True),
    )
    say(f"{results}: {ran.num_done} of {ran.num_done + ran.num_left} runs are done")
    if ran.num_left:
        again = f" --out {out}" if out else ""
        say(f"go on with: treegraft study {file}{again}{' --smoke' if smoke else ''}")
    if ran.stopped_by is not None:
        raise Ended(ran.stopped_by)
    if ran.failures:
        raise typer.Exit(1)
