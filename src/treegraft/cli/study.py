"""`treegraft study`: arms, worlds and pairs of seeds in one command that can be interrupted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from treegraft.cli.machine import machine
from treegraft.cli.options import AsJson, refuse_idle, say
from treegraft.core.errors import DataError
from treegraft.core.interrupt import Ended
from treegraft.study.plan import Plan, make_plan
from treegraft.study.results import CALLS, SECONDS, Line, failed_runs, known_runs, read_results
from treegraft.study.runner import RESULTS, run_study


def study(
    context: typer.Context,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="STUDY",
            help="File of a study, e.g. studies/methods.toml; with --table also its results alone,"
            " a .jsonl.",
        ),
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
        bool, typer.Option("--smoke", help="With the study's table [smoke]: tiny runs.")
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
    table: Annotated[
        bool, typer.Option("--table", help="Print tables of the finished runs; run nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run a study: arms in worlds, in pairs of equal seeds.

    The same command goes on where an earlier one was stopped. Results are one line a run.
    """
    if not table:
        refuse_idle(context, "without --table", "--json")
    if check or table:
        how = "with --table" if table else "with --check"
        refuse_idle(context, how, "--minutes", "--workers", *(["--check"] if table else ["--out"]))
    if table and file.suffix == ".jsonl":
        refuse_idle(context, "with a file of results", "--smoke", "--only", "--out")
        _print_tables(read_results(file), None, as_json=as_json)
        return
    plan = make_plan(file, smoke=smoke, only=only or ())
    place = out or Path("runs") / (f"{file.stem}-smoke" if smoke else file.stem)
    is_beside = out is None and not smoke
    results = file.with_suffix(".jsonl") if is_beside else place / RESULTS
    if check:
        done = known_runs(results, plan.runs)[0]
        made = {run.fingerprint for run in plan.runs if run.key in done}
        num_left = len({run.fingerprint for run in plan.runs} - made)
        say(
            f"{file}: {len(plan.runs)} runs in {plan.study.pairs} pairs; {len(done)} are done,"
            f" {num_left} are to be made"
        )
    elif table:
        found = failed_runs(results, plan.runs) | known_runs(results, plan.runs)[0]
        # In the order of the study, whichever run ended first.
        lines = [found[run.key] for run in plan.runs if run.key in found]
        _print_tables(lines, plan, as_json=as_json)
    else:
        _run(plan, place, results, workers, minutes)


def _run(plan: Plan, place: Path, results: Path, workers: int, minutes: float | None) -> None:
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
        say("the same command goes on with the others")
    if ran.stopped_by is not None:
        raise Ended(ran.stopped_by)
    if ran.failures:
        raise typer.Exit(1)


def _print_tables(lines: Sequence[Line], plan: Plan | None, *, as_json: bool) -> None:
    from treegraft.study.tables import Question, Runs, as_data, markdown

    if not lines:
        raise DataError("no run of this study is finished; expected at least one line of results.")
    study = None if plan is None else plan.study
    question = Question(baseline=lines[0]["method"])
    if study is not None:
        question = Question(
            baseline=study.baseline or next(iter(study.arms)),
            primary=study.primaries,
            goes_on=study.after_end == "last",
            at={CALLS: study.at_calls, SECONDS: study.at_cpu_s},
        )
    runs = Runs(lines, [run.key for run in plan.runs] if plan is not None else ())
    if as_json:
        print(json.dumps(as_data(runs, question)))
        return
    if study is not None and study.title:
        print(f"{study.title}\n")
    print(markdown(runs, question))
