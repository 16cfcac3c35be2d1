"""`treegraft eval`: an agent on its recipe's held-out tasks; extensions bring evaluation sets."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from treegraft.cli.commands import (
    AgentRecipe,
    AgentRun,
    AsJson,
    Overrides,
    agent_of,
    say,
    table,
)
from treegraft.cli.plugged import Plugged
from treegraft.core.text import plain

_OWN = " "
"""The command for the recipe's own tasks: it needs a name, and nobody types it."""


class _Evaluations(Plugged):
    """The commands of `treegraft eval`; words that name none are those of its own."""

    prefix = "eval "

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Options of its own may come first, which a group would take for its options.
        return super().parse_args(ctx, self._named(args))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return super().resolve_command(ctx, self._named(args))

    def _named(self, args: list[str]) -> list[str]:
        # `treegraft eval RUN` has no name of a command, and typer wants one.
        return args if args and args[0] in self.list_commands(None) else [_OWN, *args]


class _Unnamed(TyperCommand):
    """A command that is called by the name of its group."""

    def make_context(
        self, info_name: Any, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        return super().make_context(parent.info_name, args, parent=parent.parent, **extra)


eval_app = typer.Typer(
    name="eval",
    cls=_Evaluations,
    help="Measure an agent on tasks or evaluation sets.",
    rich_markup_mode=None,
)

Out = Annotated[Path | None, typer.Option(metavar="FILE", help="File for the trees (.jsonl).")]


@eval_app.command(_OWN, cls=_Unnamed, epilog="See also: treegraft eval suite.")
def own(
    run: AgentRun,
    overrides: Overrides = None,
    recipe: AgentRecipe = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Measure an agent on the held-out tasks of its own run, or on those of a recipe.

    Questions of a file are settings: tasks.kind=dataset tasks.dataset.train=[]
    'tasks.dataset.eval=["questions.jsonl"]'. `treegraft eval suite` measures it on evaluation sets.
    """
    from rich.console import Console
    from rich.text import Text

    from treegraft.runs.metrics import find_meaning

    typed = overrides or []
    checkpoint, config = agent_of(run, recipe, typed, "eval")
    # After the settings are checked: it loads torch, which takes seconds.
    from treegraft.evals.evaluate import evaluate_checkpoint
    from treegraft.runs.display import display_on

    # With a recipe the overrides are in `config` already.
    left = typed if config is None else []
    with display_on(sys.stderr if as_json else None) as display:
        result = evaluate_checkpoint(checkpoint, config, left, display=display, out=out)
    # Progress went to stderr, so that a pipe gets JSON alone.
    if as_json:
        file = str(result.out) if result.out else None
        values = {"num_tasks": result.num_tasks, "metrics": result.metrics, "out": file}
        print(json.dumps(values))
        return
    title = Text(plain(f"{run}: {result.num_tasks} tasks"))
    shown = table("metric", "value", title=title, title_justify="left")
    shown.add_column("meaning", style="dim")
    for key, value in result.metrics.items():
        shown.add_row(Text(key), f"{value:.4g}", Text(find_meaning(key) or ""))
    Console().print(shown)
    if result.out:
        say(f"trees: {result.out}")
