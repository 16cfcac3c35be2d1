"""The command line: `treegraft init | train | sft | eval | run | view | compare | buffer |
config | doctor`, and what extensions bring.

Exit codes: 0 done; 1 failed while working; 2 something to correct first (settings, data, model,
usage); 3 a checkpoint or run folder that cannot be used; 130 stopped with Ctrl-C, 143 by SIGTERM,
129 by SIGHUP, 138 by SIGUSR1. Heavy packages load inside the command that needs them.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treegraft import __version__
from treegraft.cli.buffer import buffer_app
from treegraft.cli.build import build
from treegraft.cli.commands import (
    AsJson,
    Overrides,
    Smoke,
    run_command,
    say,
    table,
)
from treegraft.cli.config import show_config
from treegraft.cli.eval import eval_app
from treegraft.cli.init import init
from treegraft.cli.plugged import Plugged
from treegraft.core.errors import (
    CheckpointError,
    DataError,
    ModelError,
    SettingError,
    TreegraftError,
    memory_fault,
)
from treegraft.core.files import storage_fault
from treegraft.core.interrupt import exit_status, others_as_ctrl_c
from treegraft.core.registry import registered_with_commands

if TYPE_CHECKING:
    from treegraft.settings.config import Config

app = typer.Typer(
    name="treegraft",
    cls=Plugged,
    help=(
        "Train language-model agents that use tools, with reinforcement learning on trees of steps."
    ),
    # Without a command, help; a traceback of typer's would hide our own errors.
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Brackets in help texts are tables of a recipe, not markup.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
buffer_app.command()(build)
app.add_typer(buffer_app)

Checkpoint = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT",
        help="Checkpoint folder, or run folder for its latest checkpoint.",
    ),
]


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"treegraft {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    trust: Annotated[
        bool,
        typer.Option(
            "--trust",
            help="Go on with a run folder or checkpoint that you did not make, whose settings may"
            " run code, and trust it from now on.",
        ),
    ] = False,
) -> None:
    """Options before the command."""
    from treegraft.runs.trust import accept

    accept(trust)


app.command()(init)


@app.command()
@run_command
def train(config: Config, **arguments: Any) -> None:
    """Train an agent with a recipe.

    Writes a run folder with metrics, trees and checkpoints.
    """
    # After the settings are checked: it loads torch, which takes seconds.
    from treegraft.train import train as run_training

    run_training(config, **arguments)


@app.command()
@run_command
def sft(config: Config, **arguments: Any) -> None:
    """Run only the supervised warm-up of a recipe, its table [warmup].

    It imitates the tasks' expert, or with warmup.traces=FILE a buffer or a JSONL file.
    """
    # Before torch loads: the command would end with the model that it began with.
    if config.warmup.num_steps == 0:
        raise SettingError(
            "warmup.num_steps is 0, so there is nothing to fine-tune; add warmup.num_steps=300.",
            code="nothing-to-imitate",
            settings=["warmup.num_steps"],
        )
    from treegraft.train import sft as run_fine_tuning

    run_fine_tuning(config, **arguments)


app.add_typer(eval_app)


@app.command()
def run(
    checkpoint: Checkpoint,
    question: Annotated[str, typer.Argument(help="Question to the agent.")],
    overrides: Overrides = None,
) -> None:
    """Ask a trained agent one question and print its steps."""
    from rich.console import Console

    from treegraft.core.types import Status
    from treegraft.evals.agent import answer_question
    from treegraft.runs.transcript import transcript
    from treegraft.settings.load import refuse_ignored

    # Settings of training would change nothing here; the user may believe that they do.
    refuse_ignored(overrides or [], "run")
    trajectory, tokenizer = answer_question(checkpoint, question, overrides or [])
    Console().print(transcript(trajectory, tokenizer))
    # For scripts: a fault of ours is no answer.
    if trajectory.status is Status.FAILED:
        raise typer.Exit(1)


@app.command()
def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Run folders, e.g. runs/first runs/second; or two folders of suites.",
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Print accuracy and cost of several runs side by side, or two suites item by item."""
    # Folders of suites have a file of their own, and it is the extension that reads them.
    for file, comparison in registered_with_commands("comparison").items():
        if any((folder / file).is_file() for folder in runs):
            comparison.load()(runs, as_json)
            return
    from rich.console import Console
    from rich.text import Text

    from treegraft.runs.metrics import meaning
    from treegraft.view.compare import COSTS, COSTS_NOTE, compare_runs

    key, rows, notes = compare_runs(runs)
    if as_json:
        print(json.dumps({"accuracy": key, "rows": dict(rows), "notes": notes}))
        return
    say(f"{key}: {meaning(key)}")
    shown = table("", *(folder.resolve().name for folder in runs), padding=(0, 2))
    for column in shown.columns[1:]:
        column.overflow = "fold"
    for name, values in rows:
        # Shares of updates, and counts of what they cost.
        form = "{:.1%}" if name.startswith("update") else "{:,.0f}"
        cells = ["-" if value is None else form.format(value) for value in values]
        shown.add_row(Text(COSTS.get(name, name), no_wrap=True), *cells)
    Console().print(shown)
    say(COSTS_NOTE, "dim")
    for note in notes:
        say(note, "yellow")


@app.command()
def view(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Run folders, or folders with runs in them; active runs are followed.",
        ),
    ],
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on; others can read the runs unless it is a loopback address."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 0,
    browser: Annotated[bool, typer.Option(help="Open the pages in the default browser.")] = True,
    text: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE",
            help="Print to the terminal instead: newest, a tree such as update-000004/0, or one of"
            " its leaves, such as update-000004/0/2.",
        ),
    ] = None,
) -> None:
    """Show runs in a browser, or with --text in the terminal.

    Charts, settings, trees, tokens and warnings.
    """
    from treegraft.view.command import view_pages, view_text

    # The pages need a server and a browser, which a machine behind ssh may not have.
    if text:
        view_text(runs, text)
    else:
        view_pages(runs, host, port, opens_browser=browser)


app.command("config")(show_config)


@app.command()
def doctor(
    recipe: Annotated[
        str | None, typer.Argument(metavar="[RECIPE]", help="Recipe whose needs are checked too.")
    ] = None,
    overrides: Overrides = None,
    smoke: Smoke = False,
    num_gpus: Annotated[
        int | None,
        typer.Option("--gpus", min=1, help="Estimate the recipe's memory on this number of GPUs."),
    ] = None,
) -> None:
    """Check the installation, this machine and the needs of a recipe.

    With a recipe, it writes the first tasks as the agent will see them and scores their references
    as answers. With --gpus, it estimates the memory for GPUs that need not be here.
    The exit code is 2 if something has to be corrected.
    """
    from treegraft.cli.doctor import examine, print_examination
    from treegraft.settings.load import load_config

    # Without a recipe, doctor looks at the installation and the machine alone.
    config = None if recipe is None else load_config(recipe, overrides or [], smoke=smoke)
    found = examine(config, num_gpus)
    print_examination(found)
    # So that a script can stop before it starts a run.
    if found.faults:
        raise typer.Exit(2)


def exit_code(error: TreegraftError) -> int:
    """Returns the exit code that an error stands for."""
    # These can be corrected before anything runs again.
    if isinstance(error, SettingError | DataError | ModelError):
        return 2
    return 3 if isinstance(error, CheckpointError) else 1


def _silence_others() -> None:
    """Keeps progress bars and warnings of the packages below us out of the display; what the user
    has set stays."""
    # Before these packages are imported, for they read their variables once.
    for name in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS"):
        # By setdefault: what the user has set stays.
        os.environ.setdefault(name, "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")


def main() -> None:
    """Runs the command line; an error of ours is one paragraph, never a traceback."""
    _silence_others()
    try:
        with others_as_ctrl_c():
            app()
    except TreegraftError as error:
        say(f"error: {error}", "red", to_stderr=True)
        sys.exit(exit_code(error))
    except (OSError, RuntimeError, MemoryError, BaseExceptionGroup) as error:
        # A full disk and a lack of memory come as errors of many packages.
        if fault := storage_fault(error):
            said = f"a file could not be used: {fault}."
        elif fault := memory_fault(error):
            said = (
                f"memory has run out ({fault}). `treegraft doctor RECIPE` estimates what a"
                " recipe takes; lower engine.max_rows, explore.num_leaves or"
                " rollout.max_completion_tokens, or free memory. A run that had begun goes on from"
                " its last checkpoint with: treegraft train --resume RUN"
            )
        else:
            raise
        say(f"error: {said}", "red", to_stderr=True)
        sys.exit(1)
    except KeyboardInterrupt as error:
        sys.exit(exit_status(error))
    except SystemExit as error:
        # Typer makes an exit with 130 of every interrupt.
        sys.exit(exit_status(error) if error.code == 130 else error.code)
