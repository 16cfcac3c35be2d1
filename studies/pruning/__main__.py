"""Pruned buffers: stored trajectories without the steps that did nothing.

python -m studies.pruning prune RECIPE BUFFER OUT --model CHECKPOINT
python -m studies.pruning show BUFFER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from studies.pruning import judging
from studies.pruning.notes import read_notes
from studies.pruning.work import BufferPruning, PruneChoice, PruneReport
from treegraft import DataError, SettingError, Trace, TraceBuffer, TreegraftError, load_config
from treegraft.parts import commands, plain

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def prune(
    recipe: commands.BufferRecipe,
    source: Annotated[Path, typer.Argument(metavar="BUFFER", help="The buffer to prune.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File of the new buffer.")],
    overrides: commands.Overrides = None,
    *,
    model: Annotated[
        str,
        typer.Option(
            metavar="CHECKPOINT",
            help="An agent that knows the tools: a run, a checkpoint, a model's folder or name.",
        ),
    ],
    margin: Annotated[
        float,
        typer.Option(help="Smallest gain of likelihood, in nats, that keeps a step."),
    ] = 0.0,
    task_best: Annotated[
        str,
        typer.Option(
            metavar="1|all",
            help="1 keeps only the best trajectory of each task, the shortest among equals.",
        ),
    ] = "all",
    keep_tool: Annotated[
        list[str] | None,
        typer.Option(help="Never cut a step with a call of this tool; may be repeated."),
    ] = None,
    as_json: commands.AsJson = False,
) -> None:
    """Write a buffer without the steps that did not help the steps after them.

    A step is cut if the rest of its trajectory is likelier without it, and the recipe's reward not
    lower. Nothing is sampled, and no tool is called but an environment's.
    """
    if task_best not in ("1", "all"):
        raise SettingError(
            f"command line: --task-best: got '{task_best}', expected 1 or all.",
            code="task-best-unknown",
        )
    config = load_config(recipe, overrides or [])
    choice = PruneChoice(
        model=model,
        buffer=source,
        out=out,
        margin=margin,
        only_best=task_best == "1",
        kept_tools=tuple(keep_tool or ()),
    )
    work = BufferPruning(config, choice)
    with judging.display_on(sys.stderr if as_json else None) as display:
        work.run(display=display)
    if work.packing_problem:
        commands.say(f"note: one path after another, since {work.packing_problem}", to_stderr=True)
    report = work.report
    if as_json:
        print(json.dumps(_numbers(report) | {"buffer": str(out), "is_stopped": work.is_stopped}))
    else:
        commands.print_rows(str(out), _rows(report))
    if work.stopped_by is not None:
        commands.say("stopped; nothing is written.", to_stderr=True)
        raise typer.Exit(128 + work.stopped_by)


def _numbers(report: PruneReport) -> dict[str, Any]:
    return {
        "num_trajectories": report.num_trajectories,
        "num_weighed": report.num_weighed,
        "num_shortened": report.num_shortened,
        "num_steps": report.num_steps,
        "num_cut": report.num_cut,
        "left_as_they_are": dict(report.left),
        "median_gain_cut": median(report.cut_gains) if report.cut_gains else None,
        "median_gain_kept": median(report.kept_gains) if report.kept_gains else None,
        "cpu_s": report.cpu_s,
    }


def _rows(report: PruneReport) -> dict[str, str]:
    each = report.num_steps / max(1, report.num_weighed)
    after = (report.num_steps - report.num_cut) / max(1, report.num_weighed)
    rows = {
        "trajectories": f"{report.num_weighed} weighed, {report.num_shortened} shortened",
        "steps": f"{report.num_cut} of {report.num_steps} cut: {each:.2f} a trajectory before,"
        f" {after:.2f} after",
        "seconds": f"{report.cpu_s:.1f} s of CPU,"
        f" {report.cpu_s / max(1, report.num_weighed):.4f} a trajectory",
    }
    for name, gains in (("cut", report.cut_gains), ("kept", report.kept_gains)):
        if gains:
            rows[f"D of {name} steps"] = (
                f"median {median(gains):+.1f} nats, {min(gains):+.1f} to {max(gains):+.1f}"
            )
    for number, (reason, count) in enumerate(report.left.most_common(), start=1):
        rows[f"as they were {number}"] = f"{count} {reason}"
    return rows


@app.command()
def show(
    buffer: commands.BufferFile,
    task: Annotated[str | None, typer.Option(help="Only trajectories of this task.")] = None,
    num: Annotated[int, typer.Option("-n", min=1, help="Most trajectories to print.")] = 5,
    as_json: commands.AsJson = False,
) -> None:
    """Print stored trajectories, and a pruned buffer's cut steps and weights of steps."""
    with closing(judging.TraceFile(buffer, create=False)) as file:
        notes = read_notes(file)
    with TraceBuffer.open_as_built(buffer) as opened:
        found = [one for one in opened.trajectories() if task in (None, one[0].task_id)]
    if not found:
        raise DataError(
            f"'{buffer}' has no trajectory{f' of task {task!r}' if task else ''}.",
            code="no-trajectory",
        )
    for traces in found[:num]:
        first = traces[0]
        note = notes.get((first.source, first.task_id, first.trajectory), {})
        if as_json:
            print(json.dumps(_as_json(traces) | {"pruning": note or None}))
        else:
            _print_trajectory(traces, note)
    if not as_json and len(found) > num:
        commands.say(f"{len(found) - num} more; -n shows more, --json all fields.", "dim")


def _as_json(traces: tuple[Trace, ...]) -> dict[str, Any]:
    first = traces[0]
    last = traces[-1]
    return {
        "source": first.source,
        "task_id": first.task_id,
        "trajectory": first.trajectory,
        "question": first.key,
        "reward": last.reward,
        "steps": [
            trace.value if isinstance(trace.value, str) else asdict(trace.value) for trace in traces
        ],
    }


def _print_trajectory(traces: tuple[Trace, ...], note: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.text import Text

    first = traces[0]
    kept = [judging.value_text(trace.value) for trace in traces]
    title = f"{first.source}, {first.task_id or 'no task'}, {first.trajectory}"
    commands.say(plain(f"{title}, reward {traces[-1].reward:g}"), "bold")
    if note and note["state"] != "pruned":
        commands.say(f"as it was: a trajectory {note['state']}", "dim")
    shown = commands.table("D, nats", "", "step", num_left=3)
    shown.columns[-1].overflow = "fold"
    left = iter(kept)
    # The cut steps stand where they stood.
    for step in note.get("steps") or [{"gain": None, "is_cut": False}] * len(kept):
        gain = "" if step["gain"] is None else f"{step['gain']:+.1f}"
        text = (
            judging.value_text(judging.content_from_json(step["value"]))
            if step["is_cut"]
            else next(left)
        )
        why = "cut, a circle" if step["gain"] is None else "cut"
        mark = Text(why if step["is_cut"] else "", "dim")
        shown.add_row(Text(gain), mark, Text(plain(text), "dim" if step["is_cut"] else ""))
    commands.say(plain(first.key), "italic")
    Console().print(shown)


def main() -> None:
    """Runs the command line; an error of the data or the settings is one sentence."""
    try:
        app()
    except TreegraftError as error:
        raise SystemExit(f"error: {plain(str(error))}") from error


if __name__ == "__main__":
    main()
