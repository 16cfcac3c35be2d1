"""`treegraft eval`: held-out tasks, a file of questions, suites of evaluation sets, and two
evaluations compared."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from treegraft.cli.options import AsJson, Overrides, refuse_idle, say, table
from treegraft.core.errors import SettingError
from treegraft.core.files import write_atomically
from treegraft.core.interrupt import Ended
from treegraft.runs.display import display_on

if TYPE_CHECKING:
    from treegraft.evals.judge import JudgeSettings
    from treegraft.evals.run import SuitePlan


Checkpoint = Annotated[
    str | None,
    typer.Argument(
        metavar="CHECKPOINT", help="Checkpoint folder, or run folder for its latest checkpoint."
    ),
]
Recipe = Annotated[str | None, typer.Option(help="Recipe to use instead of the run's settings.")]
Data = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help='File of questions: .jsonl, .json, .csv, .parquet or "hub:NAME:CONFIG/SPLIT".',
    ),
]
QuestionColumn = Annotated[str | None, typer.Option(help="Column of the question in FILE.")]
ReferenceColumn = Annotated[str | None, typer.Option(help="Column of the reference in FILE.")]
CategoryColumn = Annotated[str | None, typer.Option(help="Column whose values group the results.")]
ReferenceAfter = Annotated[
    str | None, typer.Option(help='Keep the part of the reference after this mark, e.g. "####".')
]
Num = Annotated[
    int | None, typer.Option(min=1, help="Number of questions; with --suite, of each set.")
]
Out = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="File for the trees (.jsonl); suites always store theirs."),
]
Suite = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,...",
        help="Sets or groups (arpo, rapo, gsm8k, ...); NAME=FILE reads a set from a file.",
    ),
]
DataDir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder of the sets' files. Default: the hub.")
]
Samples = Annotated[
    int | None, typer.Option(min=1, help="Trajectories per item of a suite. Default: 1.")
]
Temperature = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        help="Temperature of a suite. Default: eval.temperature, 0 for one sample where"
        " eval.greedy is on.",
    ),
]
ShuffleSeed = Annotated[
    int | None,
    typer.Option(min=0, help="Shuffle items with this seed before --num takes the first."),
]
Into = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Folder of a suite's results; the same command continues there."
    ),
]
Report = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="File for the numbers of a suite or comparison (.json)."),
]
Judge = Annotated[
    str | None,
    typer.Option(metavar="URL", help="OpenAI-compatible server that judges a suite's answers."),
]
JudgeModel = Annotated[
    str | None, typer.Option(help="Model of the judge; not needed if its server has only one.")
]
JudgeKeyEnv = Annotated[
    str | None, typer.Option(metavar="NAME", help="Environment variable with the judge's key.")
]
Compare = Annotated[
    tuple[Path, Path] | None,
    typer.Option(metavar="A B", help="Compare the results of two suites, B against A."),
]

_OF_SUITES = (
    *("--data-dir", "--samples", "--temperature", "--shuffle-seed", "--into"),
    *("--judge", "--judge-model", "--judge-key-env"),
)
_COLUMNS = ("--question-column", "--reference-column", "--category-column", "--reference-after")
_NOT_COMPARED = ("CHECKPOINT", "--suite", "--data", "--recipe", "--num", "--out")


def evaluate(
    context: typer.Context,
    checkpoint: Checkpoint = None,
    overrides: Overrides = None,
    recipe: Recipe = None,
    data: Data = None,
    question_column: QuestionColumn = None,
    reference_column: ReferenceColumn = None,
    category_column: CategoryColumn = None,
    reference_after: ReferenceAfter = None,
    num: Num = None,
    out: Out = None,
    suite: Suite = None,
    data_dir: DataDir = None,
    samples: Samples = None,
    temperature: Temperature = None,
    shuffle_seed: ShuffleSeed = None,
    into: Into = None,
    report: Report = None,
    judge: Judge = None,
    judge_model: JudgeModel = None,
    judge_key_env: JudgeKeyEnv = None,
    compare: Compare = None,
    as_json: AsJson = False,
) -> None:
    """Measure a checkpoint.

    On the held-out tasks of its own run, on those of a recipe or a file, or on suites of evaluation
    sets. The same command continues an interrupted suite.
    """
    if compare is not None:
        refuse_idle(context, "beside --compare", *_NOT_COMPARED, *_OF_SUITES, *_COLUMNS)
        _compare(*compare, report, as_json)
    elif checkpoint is None:
        raise SettingError(
            "command line: `treegraft eval` got no checkpoint; expected a run folder, or --compare"
            " A B."
        )
    elif suite is None:
        refuse_idle(context, "without --suite", *_OF_SUITES, "--report")
        if data is None:
            refuse_idle(context, "without --data FILE", *_COLUMNS)
        chosen = [] if num is None else [f"tasks.num_eval={num}"]
        columns = (question_column, reference_column, category_column, reference_after)
        chosen += [] if data is None else _data_overrides(data, columns, recipe)
        _held_out(checkpoint, chosen, overrides or [], recipe, out, as_json)
    else:
        refuse_idle(context, "beside --suite", *_COLUMNS, "--data", "--out")
        if judge is None:
            refuse_idle(context, "without --judge", "--judge-model", "--judge-key-env")
        from treegraft.evals.run import SuitePlan

        plan = SuitePlan(
            suite=suite,
            data_dir=data_dir,
            num=num,
            shuffle_seed=shuffle_seed,
            num_samples=samples or 1,
            temperature=temperature,
            judge=None if judge is None else _judge(judge, judge_model, judge_key_env),
            into=into,
        )
        _run_suite(checkpoint, plan, recipe, overrides or [], report, as_json)


def _judge(url: str, model: str | None, key_env: str | None) -> JudgeSettings:
    from treegraft.core.chat_client import api_key_from, served_model
    from treegraft.evals.judge import JudgeSettings

    key = api_key_from(key_env, "--judge-key-env")
    name = model or served_model(url, key, option="--judge", model_option="--judge-model")
    return JudgeSettings(url=url, model=name, api_key=key)


def _run_suite(
    checkpoint: str,
    plan: SuitePlan,
    recipe: str | None,
    overrides: list[str],
    report: Path | None,
    as_json: bool,
) -> None:
    from treegraft.settings.load import load_config, refuse_ignored

    refuse_ignored(overrides, "eval")
    for one in overrides:
        # Both are for held-out tasks; a suite has options of its own for them.
        if one.partition("=")[0].strip().removeprefix("eval.") in ("greedy", "num_samples"):
            raise SettingError(
                f"command line: '{one}' would have no effect beside --suite; give --samples and"
                " --temperature."
            )
    # With a recipe the overrides are in `config` already.
    config, own = (None, overrides) if recipe is None else (load_config(recipe, overrides), [])
    from treegraft.evals.run import evaluate_suite

    with display_on(sys.stderr) as display:
        result = evaluate_suite(checkpoint, plan, config, own, display=display)
    if result.report is not None:
        values = result.report.as_dict()
        _write_json(report, values)
        if as_json:
            ending = {"folder": str(result.folder), "is_stopped": result.is_stopped}
            print(json.dumps(values | ending))
        else:
            from treegraft.evals.show import print_report

            print_report(result.report, _console())
            say(f"trees and report: {result.folder}")
    if result.stopped_by is not None:
        say(
            f"stopped after {result.num_done} of {result.num_items} items, kept in {result.folder};"
            " the same command goes on.",
            to_stderr=True,
        )
        raise Ended(result.stopped_by)


def _compare(before: Path, after: Path, report: Path | None, as_json: bool) -> None:
    from treegraft.evals.show import print_comparison
    from treegraft.evals.versus import compare_evaluations

    found = compare_evaluations(before, after)
    _write_json(report, found.as_dict())
    if as_json:
        print(json.dumps(found.as_dict()))
    else:
        print_comparison(found, _console())


def _console() -> Console:
    console = Console()
    # A pipe has no width, so that tables need not be cut to one.
    return console if console.is_terminal else Console(width=200)


def _write_json(path: Path | None, values: Mapping[str, Any]) -> None:
    if path is not None:
        write_atomically(path, json.dumps(values, indent=1) + "\n")


# ---------------------------------------------------------------------- held-out tasks and files


def _data_overrides(data: str, columns: Sequence[str | None], recipe: str | None) -> list[str]:
    """Returns the settings that --data and its columns stand for."""
    if recipe is not None:
        raise SettingError(
            "command line: --data and --recipe both name the tasks; give one of them."
        )
    name = data if data.startswith("hub:") else os.path.abspath(os.path.expandvars(data))
    values: dict[str, object] = {"train": [], "eval": [name]}
    for option, value in zip(_COLUMNS, columns, strict=True):
        if value is not None:
            values[option.removeprefix("--").replace("-", "_")] = value
    # As JSON, which TOML reads alike for texts and lists: a bare "1" would become a number.
    made = [f"{key}={json.dumps(one, ensure_ascii=False)}" for key, one in values.items()]
    return ["tasks.kind=dataset", *(f"tasks.dataset.{one}" for one in made)]


def _held_out(
    checkpoint: str,
    chosen: list[str],
    typed: list[str],
    recipe: str | None,
    out: Path | None,
    as_json: bool,
) -> None:
    from treegraft.runs.metrics import find_meaning
    from treegraft.settings.load import load_config, refuse_ignored

    refuse_ignored(typed, "eval")
    settings = [*chosen, *typed]
    # With a recipe the overrides are in `config` already.
    config, own = (None, settings) if recipe is None else (load_config(recipe, settings), [])
    # After the settings are checked: it loads torch, which takes seconds.
    from treegraft.evals.evaluate import evaluate_checkpoint

    place = checkpoint if checkpoint.startswith("pypi:") else Path(checkpoint)
    with display_on(sys.stderr if as_json else None) as display:
        result = evaluate_checkpoint(place, config, own, display=display, out=out)
    if as_json:
        file = str(result.out) if result.out else None
        values = {"num_tasks": result.num_tasks, "metrics": result.metrics, "out": file}
        print(json.dumps(values))
        return
    title = Text(f"{checkpoint}: {result.num_tasks} tasks")
    shown = table("metric", "value", title=title, title_justify="left")
    shown.add_column("meaning", style="dim")
    for key, value in result.metrics.items():
        shown.add_row(Text(key), f"{value:.4g}", Text(find_meaning(key) or ""))
    Console().print(shown)
    if result.out:
        say(f"trees: {result.out}")
