"""`treegraft eval`: an agent on its recipe's held-out tasks, on suites of evaluation sets, or on a
file of questions."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from treegraft.cli.commands import (
    AsJson,
    CommandWithout,
    Overrides,
    command_without,
    complete_run,
    refuse_idle,
    say,
    table,
)
from treegraft.core.errors import SettingError
from treegraft.core.interrupt import Ended
from treegraft.core.shipped import names_recipe

if TYPE_CHECKING:
    from treegraft.evals.judge import JudgeSettings
    from treegraft.evals.run import SuitePlan
    from treegraft.settings.config import Config

_OWN = " "
"""The command for the recipe's own tasks: it needs a name, and nobody types it."""


class _Evaluations(TyperGroup):
    """The commands of `treegraft eval`; words that name none are those of its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Options of its own may come first, which a group would take for its options.
        return super().parse_args(ctx, self._named(args))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return super().resolve_command(ctx, self._named(args))

    def _named(self, args: list[str]) -> list[str]:
        return args if args and args[0] in self.commands else [_OWN, *args]


class _Unnamed(CommandWithout):
    """A command that is called by the name of its group."""

    retired: ClassVar[Mapping[str, str]] = {
        "--suite": "treegraft eval suite RUN {}",
        "--data": "treegraft eval file RUN {}",
        "--compare": "treegraft compare A B",
        "--num": "tasks.num_eval={}",
    }

    def make_context(
        self, info_name: Any, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        return super().make_context(parent.info_name, args, parent=parent.parent, **extra)


_OF_FILES = {
    "--num": "tasks.num_eval={}",
    "--question-column": "tasks.dataset.question_column={}",
    "--reference-column": "tasks.dataset.reference_column={}",
    "--category-column": "tasks.dataset.category_column={}",
    "--reference-after": "tasks.dataset.reference_after={}",
}
_OF_SUITES = {
    "--samples": "eval.greedy=false eval.num_samples={}",
    "--temperature": "eval.greedy=false eval.temperature={}",
    "--report": "--json > {}",
}

eval_app = typer.Typer(
    name="eval",
    cls=_Evaluations,
    help="Measure an agent on tasks, evaluation sets or a file.",
    rich_markup_mode=None,
)

Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        autocompletion=complete_run,
        help="Run folder for its latest checkpoint, a checkpoint, a model's folder, or a recipe for"
        " its model as training begins.",
    ),
]
Recipe = Annotated[
    str | None, typer.Option(help="Recipe whose settings are used instead of the run's.")
]
Out = Annotated[Path | None, typer.Option(metavar="FILE", help="File for the trees (.jsonl).")]


@eval_app.command(_OWN, cls=_Unnamed, epilog="See also: treegraft eval suite, treegraft eval file.")
def own(
    run: Run,
    overrides: Overrides = None,
    recipe: Recipe = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Measure an agent on the held-out tasks of its own run, or on those of a recipe.

    `treegraft eval suite` measures it on evaluation sets, `treegraft eval file` on your questions.
    """
    _held_out(run, recipe, [], overrides or [], out, as_json)


@eval_app.command("file", cls=command_without(_OF_FILES))
def of_file(
    run: Run,
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help='Questions: .jsonl, .json, .csv, .parquet or "hub:NAME:CONFIG/SPLIT".',
        ),
    ],
    overrides: Overrides = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Measure an agent on the questions of a file.

    Columns are settings, such as tasks.dataset.question_column=problem.
    """
    place = file if file.startswith("hub:") else os.path.abspath(os.path.expandvars(file))
    # As JSON, which TOML reads alike: a bare "1" would become a number.
    named = json.dumps([place], ensure_ascii=False)
    chosen = ["tasks.kind=dataset", "tasks.dataset.train=[]", f"tasks.dataset.eval={named}"]
    _held_out(run, None, chosen, overrides or [], out, as_json)


@eval_app.command("suite", cls=command_without(_OF_SUITES))
def of_suite(
    context: typer.Context,
    run: Run,
    sets: Annotated[
        str,
        typer.Argument(
            metavar="SETS",
            help="Sets or groups, separated by commas (arpo, rapo, gsm8k, ...); NAME=FILE reads a"
            " set from a file.",
        ),
    ],
    overrides: Overrides = None,
    recipe: Recipe = None,
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
        typer.Option(metavar="URL", help="OpenAI-compatible server that judges the answers."),
    ] = None,
    judge_model: Annotated[
        str | None, typer.Option(help="Model of the judge; not needed if its server has only one.")
    ] = None,
    judge_key_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Environment variable with the judge's key.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure an agent on suites of evaluation sets; the same command continues an interrupted one.

    One greedy trajectory per item, or with eval.greedy=false eval.num_samples sampled ones.
    """
    if judge is None:
        refuse_idle(context, "without --judge", "--judge-model", "--judge-key-env")
    from treegraft.evals.run import SuitePlan

    plan = SuitePlan(
        suite=sets,
        data_dir=data_dir,
        num=num,
        shuffle_seed=shuffle_seed,
        judge=None if judge is None else _judge(judge, judge_model, judge_key_env),
        into=into,
    )
    _run_suite(run, recipe, plan, overrides or [], as_json)


def _agent_of(
    run: str, recipe: str | None, settings: Sequence[str]
) -> tuple[Path | str | None, Config | None]:
    """Returns (checkpoint, settings) of RUN; without the one it is a recipe, whose own model is
    asked, without the other the checkpoint's settings count."""
    from treegraft.settings.load import load_config

    if names_recipe(run):
        if recipe is not None:
            raise SettingError(
                f"command line: '{run}' is a recipe, and --recipe names another; give a run or a"
                " checkpoint before --recipe, or one recipe alone.",
                code="recipe-twice",
            )
        return None, load_config(run, settings)
    place = run if run.startswith("pypi:") else Path(run)
    return place, None if recipe is None else load_config(recipe, settings)


def _judge(url: str, model: str | None, key_env: str | None) -> JudgeSettings:
    from treegraft.core.chat_client import api_key_from, served_model
    from treegraft.evals.judge import JudgeSettings

    key = api_key_from(key_env, "--judge-key-env")
    name = model or served_model(url, key, option="--judge", model_option="--judge-model")
    return JudgeSettings(url=url, model=name, api_key=key)


def _run_suite(
    run: str, recipe: str | None, plan: SuitePlan, overrides: list[str], as_json: bool
) -> None:
    from treegraft.settings.load import refuse_ignored

    refuse_ignored(overrides, "eval suite")
    for one in overrides:
        name, _, value = (part.strip() for part in one.partition("="))
        if name in ("tasks.num_eval", "num_eval"):
            raise SettingError(
                f"command line: '{one}' would have no effect on evaluation sets; give --num"
                f" {value}.",
                code="override-idle",
            )
    checkpoint, config = _agent_of(run, recipe, overrides)
    from treegraft.evals.run import evaluate_suite
    from treegraft.runs.display import display_on

    with display_on(sys.stderr) as display:
        result = evaluate_suite(checkpoint, plan, config, overrides, display=display)
    if result.report is not None:
        if as_json:
            ending = {"folder": str(result.folder), "is_stopped": result.is_stopped}
            print(json.dumps(result.report.as_dict() | ending))
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


def compare_suites(folders: Sequence[Path], as_json: bool) -> None:
    """Prints the results of two suites, the second against the first.

    Raises SettingError for another number of folders.
    """
    from treegraft.evals.show import print_comparison
    from treegraft.evals.versus import compare_evaluations

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


def _held_out(
    run: str,
    recipe: str | None,
    chosen: list[str],
    typed: list[str],
    out: Path | None,
    as_json: bool,
) -> None:
    from treegraft.runs.metrics import find_meaning
    from treegraft.settings.load import refuse_ignored

    refuse_ignored(typed, "eval")
    settings = [*chosen, *typed]
    checkpoint, config = _agent_of(run, recipe, settings)
    # After the settings are checked: it loads torch, which takes seconds.
    from treegraft.evals.evaluate import evaluate_checkpoint
    from treegraft.runs.display import display_on

    # With a recipe the overrides are in `config` already.
    own = settings if config is None else []
    with display_on(sys.stderr if as_json else None) as display:
        result = evaluate_checkpoint(checkpoint, config, own, display=display, out=out)
    if as_json:
        file = str(result.out) if result.out else None
        values = {"num_tasks": result.num_tasks, "metrics": result.metrics, "out": file}
        print(json.dumps(values))
        return
    title = Text(f"{run}: {result.num_tasks} tasks")
    shown = table("metric", "value", title=title, title_justify="left")
    shown.add_column("meaning", style="dim")
    for key, value in result.metrics.items():
        shown.add_row(Text(key), f"{value:.4g}", Text(find_meaning(key) or ""))
    Console().print(shown)
    if result.out:
        say(f"trees: {result.out}")
