"""`treegraft buffer import | add | stats | search`: the Step-Trace Buffer on the command line;
`build` is in build.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from treegraft.cli.options import AsJson, say, table
from treegraft.core.errors import DataError, SettingError
from treegraft.core.text import plain

if TYPE_CHECKING:
    from treegraft.traces.collect import StoredCounts

buffer_app = typer.Typer(
    name="buffer",
    help="Fill, inspect and search a Step-Trace Buffer.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

MAX_PROBLEMS = 10
"""Lines of a file that could not be read and are named one by one."""

Encoder = Annotated[
    str | None,
    typer.Option(
        help=(
            '"minilm", "hashing", a sentence-transformers folder or hub id, or "pypi:PACKAGE".'
            " Default: that of an existing buffer; for a new one the recipe's buffer.encoder, or"
            " minilm without a recipe."
        )
    ),
]
BufferFile = Annotated[Path, typer.Argument(metavar="BUFFER", help="File of a Step-Trace Buffer.")]
BufferOrRun = Annotated[
    Path,
    typer.Argument(metavar="BUFFER", help="File of a Step-Trace Buffer, or a run that uses one."),
]

MinReward = Annotated[float, typer.Option(help="Keep only trajectories with a reward above this.")]
Keep = Annotated[int, typer.Option(min=1, help="Trajectories kept per task, the best by reward.")]
Recipe = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE", help="Recipe with the training tasks, tools, format and rewards."
    ),
]


def kept_rows(report: StoredCounts, num_kept: int) -> dict[str, str]:
    """Returns the rows on what became of trajectories and traces."""
    rows = {
        "trajectories": (
            f"{num_kept} kept, {report.num_too_low} too low in reward, {report.num_surplus} not"
            " among the best"
        ),
        "traces": f"{report.num_new} new, {report.num_duplicates} there already",
    }
    if report.num_keys_cut:
        rows["keys cut"] = (
            f"{report.num_keys_cut} were longer than the encoder reads, and lost their beginning"
        )
    return rows


def print_rows(title: str, rows: Mapping[str, str]) -> None:
    """Prints a title and a line for each row."""
    say(title, "bold")
    shown = table(show_header=False)
    shown.add_column(no_wrap=True, style="dim")
    shown.add_column(overflow="fold")
    for name, value in rows.items():
        shown.add_row(Text(name), Text(value))
    Console().print(shown)


@buffer_app.command("import")
def import_traces(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="JSONL files of messages, tag text or steps; recorded trees; run folders.",
        ),
    ],
    into: Annotated[
        Path,
        typer.Option(metavar="BUFFER", help="File of the buffer; created if it does not exist."),
    ],
    encoder: Encoder = None,
    source: Annotated[
        str | None,
        typer.Option(help="Name of the agent in the buffer. Default: the name of each file."),
    ] = None,
    keep: Keep = 5,
    min_reward: MinReward = 0.0,
    reward: Annotated[float, typer.Option(help="Reward of rows without one.")] = 1.0,
    reward_column: Annotated[str, typer.Option(help="Column of the reward.")] = "reward",
    task_column: Annotated[str, typer.Option(help="Column of the task's id.")] = "task_id",
    as_json: AsJson = False,
) -> None:
    """Add trajectories from files.

    Reports lines that cannot be read and imports the others.
    """
    from treegraft.traces.buffer import TraceBuffer
    from treegraft.traces.imports import Columns, check_paths, import_files

    # Before the buffer is opened, which would make its file.
    check_paths(files)
    columns = Columns(reward=reward_column, task_id=task_column, default_reward=reward)
    with no_empty_file(into), TraceBuffer(into, _encoder_for(into, encoder)) as buffer:
        report = import_files(
            files, buffer, source=source, columns=columns, num_best=keep, min_reward=min_reward
        )
    problems = [str(problem) for problem in report.problems]
    if as_json:
        print(json.dumps(asdict(report) | {"problems": problems}))
    else:
        kept = report.num_trajectories - report.num_too_low - report.num_surplus
        left_out = {"left out": f"{len(problems)} lines"} if problems else {}
        print_rows(str(into), kept_rows(report, kept) | left_out)
        for problem in problems[:MAX_PROBLEMS]:
            say(plain(problem, 300), to_stderr=True)
        if more := len(problems[MAX_PROBLEMS:]):
            say(f"... and {more} more lines; --json lists all", to_stderr=True)
    if not report.num_new and not report.num_duplicates:
        raise DataError(
            f"nothing was imported into {into}; expected at least one trajectory with a reward"
            f" above {min_reward:g}."
        )


@contextmanager
def no_empty_file(path: Path) -> Iterator[None]:
    """Removes a buffer that the block has made and left empty."""
    from treegraft.traces.buffer import remove_if_empty

    was_there = path.expanduser().exists()
    try:
        yield
    finally:
        if not was_there:
            remove_if_empty(path)


def _encoder_for(path: Path, encoder: str | None) -> str | None:
    """Returns the encoder to open a buffer with: the chosen one, else None (its own) for a buffer
    that exists, and the papers' for a new one."""
    return encoder or (None if path.expanduser().exists() else "minilm")


@buffer_app.command()
def add(
    buffer: BufferFile,
    key: Annotated[
        str | None,
        typer.Option(help="Question and earlier steps; without it, JSON is read from stdin."),
    ] = None,
    value: Annotated[str | None, typer.Option(help="The step, as text.")] = None,
    reward: Annotated[float, typer.Option(help="Reward of its trajectory.")] = 1.0,
    source: Annotated[str, typer.Option(help="Name of the agent that wrote it.")] = "hand",
    task: Annotated[str, typer.Option(help="Id of its task.")] = "",
    position: Annotated[int, typer.Option(min=0, help="Number of steps before it.")] = 0,
    terminal: Annotated[
        bool, typer.Option("--terminal", help="The step has the final answer.")
    ] = False,
    encoder: Encoder = None,
    as_json: AsJson = False,
) -> None:
    """Add one trace from options, or one per line of JSON from stdin.

    A line has "key", "value" (text, or a step of "thought", "calls", "observations", "answer"), and
    may have "reward", "source", "task_id", "position", "terminal" and "trajectory".
    """
    from treegraft.core.types import Trace
    from treegraft.traces.buffer import TraceBuffer
    from treegraft.traces.imports import read_trace

    if (key is None) != (value is None):
        raise SettingError(
            "command line: --key and --value go together; give both, or neither and JSON on stdin."
        )
    defaults = Trace(
        key=key or "",
        value=value or "",
        reward=reward,
        source=source,
        task_id=task,
        position=position,
        terminal=terminal,
    )
    if key is not None:
        traces = [defaults]
    else:
        lines = [line for line in sys.stdin.read().splitlines() if line.strip()]
        traces = [read_trace(line, number, defaults) for number, line in enumerate(lines, start=1)]
    if not traces:
        raise DataError("stdin: got no line; expected JSON of a trace, or --key and --value.")
    with no_empty_file(buffer), TraceBuffer(buffer, _encoder_for(buffer, encoder)) as opened:
        num_new = opened.add(traces)
        num_traces = len(opened)
    old = len(traces) - num_new
    if as_json:
        print(json.dumps({"num_new": num_new, "num_duplicates": old, "num_traces": num_traces}))
    else:
        counts = f"{num_new} new, {old} there already, {num_traces} in all"
        print_rows(str(buffer), {"traces": counts})


@buffer_app.command()
def stats(buffer: BufferOrRun, as_json: AsJson = False) -> None:
    """Print the contents of a buffer in numbers."""
    from treegraft.traces.buffer import TraceBuffer
    from treegraft.traces.run_buffer import buffer_file

    buffer = buffer_file(buffer)
    with TraceBuffer.open_as_built(buffer) as opened:
        found = opened.stats()
        fingerprint = opened.fingerprint()
    if as_json:
        print(json.dumps(asdict(found) | {"fingerprint": fingerprint}))
        return
    rows = {
        "traces": f"{found.num_traces}, {found.num_terminal} of them with a final answer",
        "trajectories": f"{found.num_trajectories}, {found.steps_per_trajectory:.2f} steps each",
        "tasks": f"{found.num_tasks}",
        "encoder": f"{found.encoder}, {found.dim} dimensions",
        "index": found.index,
        "file": f"{found.num_bytes / 1e6:.1f} MB, fingerprint {fingerprint}",
    }
    if found.policy_versions is not None:
        rows["policy versions"] = "{} to {}".format(*found.policy_versions)
    if found.num_evicted:
        rows["evicted"] = f"{found.num_evicted}"
    print_rows(str(buffer), rows)
    agents = table("source", "traces", "trajectories", "mean reward")
    for name, one in found.sources.items():
        counts = (str(one.num_traces), str(one.num_trajectories))
        agents.add_row(Text(name), *counts, f"{one.mean_reward:.3f}")
    Console().print(agents)


@buffer_app.command()
def search(
    buffer: BufferOrRun,
    text: Annotated[
        str,
        typer.Argument(
            help=(
                'Question, optionally followed by the steps so far, one line each: "NAME BODY",'
                " then the result."
            )
        ),
    ],
    num: Annotated[int, typer.Option("-k", min=1, help="Number of traces.")] = 3,
    source: Annotated[
        list[str] | None, typer.Option(help="Only traces of this agent; may be repeated.")
    ] = None,
    allow_terminal: Annotated[
        bool, typer.Option("--allow-terminal", help="Include steps with the final answer.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print the traces whose history is most similar to a text."""
    from treegraft.traces.buffer import TraceBuffer
    from treegraft.traces.keys import value_text
    from treegraft.traces.run_buffer import buffer_file

    with TraceBuffer.open_as_built(buffer_file(buffer)) as opened:
        (found,) = opened.search([text], num, allow_terminal=allow_terminal, sources=source or ())
    if as_json:
        print(json.dumps([asdict(trace) | {"similarity": score} for trace, score in found]))
        return
    if not found:
        say("nothing found")
    for trace, similarity in found:
        place = f"{trace.source}, {trace.task_id or 'no task'}, step {trace.position}"
        title = plain(f"{place}, reward {trace.reward:g}")
        rows = {"history": plain(trace.key), "step": plain(value_text(trace.value))}
        print_rows(f"{similarity:.3f}  {title}", rows)
