"""`treegraft study`: arms, worlds and pairs of seeds in one command that can be interrupted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

import treegraft
from treegraft import DataError, SettingError
from treegraft.extras.lab.machine import machine
from treegraft.extras.lab.study.plan import Plan, make_plan
from treegraft.extras.lab.study.results import (
    CALLS,
    SECONDS,
    Line,
    lines_of,
    read_results,
)
from treegraft.extras.lab.study.runner import RESULTS, run_study
from treegraft.extras.lab.text import counted, quoted
from treegraft.parts import commands, errors, interrupt

File = Annotated[
    Path,
    typer.Argument(
        metavar="STUDY",
        help="File of a study, e.g. studies/methods.toml, or the name of one in a clone.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Folder of runs and of results.jsonl. Default: runs/NAME, with the results next to the"
        " study, in NAME.jsonl.",
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Run only this arm or world; may be repeated."),
]
Pairs = Annotated[int | None, typer.Option(min=1, help="Only so many pairs, from the first.")]
Brief = Annotated[
    bool,
    typer.Option(
        "--brief",
        help="With --table: one table a world in place of all, the arms ordered by accuracy at the"
        " first budget of calls.",
    ),
]
Baseline = Annotated[
    str | None,
    typer.Option(metavar="ARM", help="With --table: compare each arm with this one."),
]
Lines = Annotated[
    bool,
    typer.Option(
        "--lines",
        help="Print the study's finished runs, one JSON object a line, which `treegraft report`"
        " reads from a .jsonl; run nothing.",
    ),
]


def study(
    context: typer.Context,
    file: File,
    out: Out = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="With the study's table [smoke]: tiny runs.")
    ] = False,
    workers: Annotated[int, typer.Option(min=1, help="Processes, of one thread each.")] = 2,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Begin no run after this number of minutes.")
    ] = None,
    only: Only = None,
    pairs: Pairs = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check the study and count its runs; run nothing.")
    ] = False,
    table: Annotated[
        bool, typer.Option("--table", help="Print tables of the finished runs; run nothing.")
    ] = False,
    is_brief: Brief = False,
    baseline: Baseline = None,
    as_lines: Lines = False,
) -> None:
    """Run a study: arms in worlds, in pairs of equal seeds.

    The same command resumes a stopped study. Results are one line a run.
    """
    # Each prints something else to the same place.
    modes = {"--lines": as_lines, "--table": table, "--check": check}
    mode = next((name for name, value in modes.items() if value), "")
    if mode:
        others = [name for name in modes if name != mode]
        commands.refuse_idle(context, f"with {mode}", "--minutes", "--workers", *others)
    if mode != "--table":
        commands.refuse_idle(context, "without --table", "--brief", "--baseline")
    file = file if file.is_file() else _shipped(file)
    plan = make_plan(file, smoke=smoke, only=only or (), pairs=pairs)
    # Results are in git next to the study; runs are not.
    beside = file.parent / (plan.study.results or f"{file.stem}.jsonl")
    # Studies that share their results share warm-ups and buffers.
    place = out or Path("runs") / (f"{file.stem}-smoke" if smoke else beside.stem)
    results = beside if out is None and not smoke else place / RESULTS
    if check:
        _say_counts(plan, results)
    elif table:
        _print_tables(lines_of(plan, results), plan, baseline, is_brief=is_brief)
    elif as_lines:
        for line in lines_of(plan, results):
            print(json.dumps(line, default=str))
    else:
        _run(plan, place, results, workers, minutes)


def _shipped(file: Path) -> Path:
    """The file of a study of this clone by its name; other paths as they are."""
    found = Path(treegraft.__file__).parents[2] / "studies" / f"{file}.toml"
    return found if file.name == str(file) and found.is_file() else file


def _say_counts(plan: Plan, results: Path) -> None:
    # Also a run that another study has made, or another arm of this one, is not made again.
    made = {line.get("fingerprint") for line in read_results(results)}
    left = [run.fingerprint for run in plan.runs if run.fingerprint not in made]
    num_different = len(set(left))
    also = f", {num_different} of them different" if num_different < len(left) else ""
    commands.say(
        f"{plan.path}: {counted(len(plan.runs), 'run')} in"
        f" {counted(len({run.pair for run in plan.runs}), 'pair')};"
        f" done: {len(plan.runs) - len(left)}, to be made: {len(left)}{also}"
    )


def _run(plan: Plan, place: Path, results: Path, workers: int, minutes: float | None) -> None:
    ran = run_study(
        plan,
        place,
        results,
        workers=workers,
        minutes=minutes,
        facts={"machine": machine(1)},
        say=lambda text: commands.say(text, to_stderr=True),
    )
    commands.say(f"{results}: {ran.num_done} of {counted(ran.num_done + ran.num_left, 'run')} done")
    if ran.num_left:
        commands.say("the same command goes on with the others")
    # The exit status of a signal, so that scripts stop too.
    if ran.stopped_by is not None:
        raise interrupt.Ended(ran.stopped_by)
    if ran.failures:
        raise typer.Exit(1)


def _print_tables(
    lines: Sequence[Line], plan: Plan, baseline: str | None, *, is_brief: bool
) -> None:
    from treegraft.extras.lab.study.tables import Question, Runs, markdown

    if not lines:
        raise DataError(
            "no run is finished; expected at least one line of results.", code="no-run-finished"
        )
    arms = list(dict.fromkeys(line["method"] for line in lines))
    if baseline is not None and baseline not in arms:
        raise SettingError(
            f"command line: --baseline '{baseline}': no run of this arm is there; there are"
            f" {quoted(arms)}.{errors.nearest(baseline, arms)}",
            code="unknown-arm",
        )
    study = plan.study
    question = Question(
        baseline=baseline or study.baseline or next(iter(study.arms)),
        primary=study.primaries,
        at={CALLS: study.at_calls, SECONDS: study.at_cpu_s},
    )
    if study.title and not is_brief:
        print(f"{study.title}\n")
    runs = Runs(lines, [run.key for run in plan.runs])
    print(markdown(runs, question, is_brief=is_brief, with_baseline=baseline is not None))
