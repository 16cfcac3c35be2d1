"""`treegraft buffer import | stats | search | show`: the Step-Trace Buffer on the command line;
`build` is in build.py."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from treegraft.cli.commands import (
    AsJson,
    BufferFile,
    print_facts,
    print_rows,
    say,
    settings_alone,
    split_overrides,
)
from treegraft.cli.plugged import Plugged
from treegraft.core.errors import DataError
from treegraft.core.text import plain

if TYPE_CHECKING:
    from treegraft.settings.config import Config


class _Buffers(Plugged):
    """The commands of `treegraft buffer`."""

    prefix = "buffer "


buffer_app = typer.Typer(
    name="buffer",
    cls=_Buffers,
    help="Fill, inspect and search a Step-Trace Buffer.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

MAX_PROBLEMS = 10
"""Lines of a file that could not be read and are named one by one."""

ENCODER = "buffer.encoder"
OF_IMPORT = (ENCODER, *(f"buffer.build.{one}" for one in ("num_best", "min_reward", "source")))
"""Settings that `buffer import` takes notice of."""


@buffer_app.command("import")
def import_traces(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE... [OVERRIDES]...",
            help="JSONL files of messages, tag text or steps; recorded trees; run folders. Then"
            f" settings to change, of {', '.join(OF_IMPORT)}.",
        ),
    ],
    into: Annotated[
        Path,
        typer.Option(metavar="BUFFER", help="File of the buffer; created if it does not exist."),
    ],
    as_json: AsJson = False,
) -> None:
    """Add trajectories from files, the best of each task.

    Reports lines that cannot be read and imports the others. A row may have a "task_id" and a
    "reward", which is 1 if it has none. An agent has the name of its file, unless
    buffer.build.source says another.
    """
    from treegraft.traces.buffer import TraceBuffer
    from treegraft.traces.imports import check_paths, import_files

    places, overrides = split_overrides(words)
    config = settings_alone(overrides, "buffer import", OF_IMPORT, {})
    files = [Path(one) for one in places]
    own = config.buffer.build
    # Before the buffer is opened, which would make its file.
    check_paths(files)
    with TraceBuffer(into, _encoder_for(into, config)) as buffer:
        report = import_files(
            files,
            buffer,
            source=own.source,
            num_best=own.num_best,
            min_reward=own.min_reward,
        )
    # Told after the counts: one bad line of a million is no reason to import nothing.
    problems = [str(problem) for problem in report.problems]
    facts = asdict(report)
    if as_json:
        facts["problems"] = problems
    else:
        facts["problems"] = len(problems)
    print_facts(str(into), facts, as_json)
    if not as_json:
        for problem in problems[:MAX_PROBLEMS]:
            say(plain(problem, 300), to_stderr=True)
        if len(problems) > MAX_PROBLEMS:
            say("--json lists all problems", to_stderr=True)
    if not report.num_new and not report.num_duplicates:
        raise DataError(
            f"nothing was imported into {into}; expected at least one trajectory with a reward"
            f" above {own.min_reward:g}.",
            code="nothing-imported",
        )


def _encoder_for(path: Path, config: Config) -> str | None:
    """Returns the encoder to open a buffer with: the one that was typed, else None (its own) for a
    buffer that exists, and the default for a new one."""
    is_typed = "encoder" in config.buffer.model_fields_set
    return None if path.expanduser().exists() and not is_typed else config.buffer.encoder


@buffer_app.command()
def stats(buffer: BufferFile, as_json: AsJson = False) -> None:
    """Print the contents of a buffer in numbers."""
    from treegraft.traces.buffer import TraceBuffer

    with TraceBuffer.open_as_built(buffer) as opened:
        facts = asdict(opened.stats()) | {"checksum": opened.checksum()}
    print_facts(str(buffer), facts, as_json)


@buffer_app.command()
def search(
    buffer: BufferFile,
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
    as_json: AsJson = False,
) -> None:
    """Print the traces whose history is most similar to a text."""
    from treegraft.traces.buffer import TraceBuffer
    from treegraft.traces.keys import value_text

    with TraceBuffer.open_as_built(buffer) as opened:
        (found,) = opened.search([text], num, allow_terminal=True)
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


@buffer_app.command()
def show(
    buffer: BufferFile,
    task: Annotated[str | None, typer.Option(help="Only trajectories of this task.")] = None,
    num: Annotated[int, typer.Option("-n", min=1, help="Most trajectories to print.")] = 5,
) -> None:
    """Print stored trajectories step by step."""
    from treegraft.traces.buffer import TraceBuffer
    from treegraft.traces.keys import value_text

    with TraceBuffer.open_as_built(buffer) as opened:
        found = [one for one in opened.trajectories() if task in (None, one[0].task_id)]
    if not found:
        raise DataError(
            f"'{buffer}' has no trajectory{f' of task {task!r}' if task else ''}.",
            code="no-trajectory",
        )
    for traces in found[:num]:
        first = traces[0]
        place = f"{first.source}, {first.task_id or 'no task'}, {first.trajectory}"
        rows = {"task": plain(first.key)}
        for trace in traces:
            rows[f"step {trace.position}"] = plain(value_text(trace.value))
        print_rows(plain(f"{place}, reward {traces[-1].reward:g}"), rows)
    if len(found) > num:
        say(f"{len(found) - num} more; -n shows more.", "dim")
