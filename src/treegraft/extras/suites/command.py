"""`treegraft eval suite`, and `treegraft compare` of two of its folders."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from treegraft import SettingError
from treegraft.parts import commands, interrupt, measuring

if TYPE_CHECKING:
    from treegraft.extras.suites.judge import JudgeSettings
    from treegraft.extras.suites.run import SuitePlan

JUDGE_KEY = "TREEGRAFT_JUDGE_KEY"

suite_app = typer.Typer(
    name="suite",
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@suite_app.command("suite")
def of_suite(
    context: typer.Context,
    run: commands.AgentRun,
    sets: Annotated[
        str,
        typer.Argument(
            metavar="SETS",
            help="Sets or groups, separated by commas (arpo, rapo, gsm8k, ...); NAME=FILE reads a"
            " set from a file.",
        ),
    ],
    overrides: commands.Overrides = None,
    recipe: commands.AgentRecipe = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the sets' files. Default: the hub."),
    ] = None,
    num: Annotated[
        int | None, typer.Option(min=1, help="Number of items of each set. Default: all.")
    ] = None,
    shuffle_seed: Annotated[
        int | None,
        typer.Option(min=0, help="Shuffle items with this seed before --num takes the first."),
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder of the results; the same command continues there."
        ),
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help=f"OpenAI-compatible server that judges the answers; its key is in {JUDGE_KEY}.",
        ),
    ] = None,
    judge_model: Annotated[
        str | None, typer.Option(help="Model of the judge; not needed if its server has only one.")
    ] = None,
    as_json: commands.AsJson = False,
) -> None:
    """Measure an agent on suites of evaluation sets; the same command continues an interrupted one.

    One greedy trajectory per item, or with eval.greedy=false eval.num_samples sampled ones.
    """
    if judge is None:
        commands.refuse_idle(context, "without --judge", "--judge-model")
    from treegraft.extras.suites.run import SuitePlan

    plan = SuitePlan(
        suite=sets,
        data_dir=data_dir,
        num=num,
        shuffle_seed=shuffle_seed,
        judge=None if judge is None else _judge(judge, judge_model),
        into=into,
    )
    _run_suite(run, recipe, plan, overrides or [], as_json)


def _judge(url: str, model: str | None) -> JudgeSettings:
    from treegraft.extras.chat import served_model
    from treegraft.extras.suites.judge import JudgeSettings

    # From the environment, since a command line can be read by other users.
    key = os.environ.get(JUDGE_KEY)
    name = model or served_model(url, key, option="--judge", model_option="--judge-model")
    return JudgeSettings(url=url, model=name, api_key=key)


def _run_suite(
    run: str, recipe: str | None, plan: SuitePlan, overrides: list[str], as_json: bool
) -> None:
    for one in overrides:
        name, _, value = (part.strip() for part in one.partition("="))
        if name in ("tasks.num_eval", "num_eval"):
            raise SettingError(
                f"command line: '{one}' would have no effect on evaluation sets; give --num"
                f" {value}.",
                code="override-idle",
            )
    checkpoint, config = commands.agent_of(run, recipe, overrides, "eval suite")
    from treegraft.extras.suites.run import evaluate_suite

    with measuring.display_on(sys.stderr) as display:
        result = evaluate_suite(checkpoint, plan, config, overrides, display=display)
    if result.report is not None:
        if as_json:
            is_stopped = result.stopped_by is not None
            ending = {"folder": str(result.folder), "is_stopped": is_stopped}
            print(json.dumps(result.report.as_dict() | ending))
        else:
            from treegraft.extras.suites.show import print_report

            print_report(result.report, _console())
            commands.say(f"trees and report: {result.folder}")
    if result.stopped_by is not None:
        commands.say(
            f"stopped after {result.num_done} of {result.num_items} items, kept in {result.folder};"
            " the same command goes on.",
            to_stderr=True,
        )
        # After the numbers so far are printed.
        raise interrupt.Ended(result.stopped_by)


def compare_suites(folders: Sequence[Path], as_json: bool) -> None:
    """Prints the results of two suites, the second against the first.

    Raises SettingError for another number of folders.
    """
    from treegraft.extras.suites.compare import compare_evaluations
    from treegraft.extras.suites.show import print_comparison

    if len(folders) != 2:
        raise SettingError(
            f"command line: got {len(folders)} folders of suites; expected two, the second to be"
            " compared with the first.",
            code="two-suites-needed",
        )
    found = compare_evaluations(*folders)
    if as_json:
        print(json.dumps(found.as_dict()))
    else:
        print_comparison(found, _console())


def _console() -> Console:
    console = Console()
    # A pipe has no width, so that tables need not be cut to one.
    return console if console.is_terminal else Console(width=200)
