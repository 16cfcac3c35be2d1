"""`treegraft data check | show`: data sets inspected before use."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from treegraft.parts import commands, plain

if TYPE_CHECKING:
    from treegraft.extras.data.check import Contamination, FileDefects

data_app = typer.Typer(
    name="data",
    help="Inspect data before using it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

MAX_EXAMPLES = 5
"""Overlapping questions that are shown of each file; --json has all."""


_NO_TOOLS = {"rollout": {"max_tool_calls": 0}}
"""Without them a data set is refused as tasks of an agent that could call nothing."""
_COLUMNS = ("tasks.dataset.question_column", "tasks.dataset.reference_column")


@data_app.command()
def check(
    train: Annotated[
        str,
        typer.Argument(
            metavar="TRAIN",
            help='Training data: .jsonl, .json, .csv, .parquet or "hub:NAME:CONFIG/SPLIT".',
        ),
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[EVAL]... [OVERRIDES]...",
            help="Evaluation data to look for in TRAIN; then columns of TRAIN, such as"
            " tasks.dataset.question_column=problem; dots select nested ones.",
        ),
    ] = None,
    near: Annotated[
        float,
        typer.Option(
            min=0.1,
            max=1.0,
            help="Share of common three-word sequences that makes two questions duplicates.",
        ),
    ] = 0.7,
    as_json: commands.AsJson = False,
) -> None:
    """Find defects, duplicates and evaluation questions in training data.

    The exit code is 1 if anything is found.
    """
    from treegraft.extras.data.check import check_data

    evals, overrides = commands.split_overrides(words or [])
    base = {"tasks": {"kind": "dataset", "dataset": {"train": [train]}}, **_NO_TOOLS}
    columns = commands.settings_alone(overrides, "data check", _COLUMNS, base).tasks.dataset
    typed = {name: getattr(columns, name) for name in columns.model_fields_set}
    found = check_data(
        train,
        evals,
        question=typed.get("question_column"),
        reference=typed.get("reference_column"),
        near=near,
    )
    if as_json:
        print(json.dumps(found.as_dict()))
    else:
        for file in found.files:
            _print_file(file)
        for one in found.contamination:
            _print_contamination(one, train)
    if not found.is_clean:
        raise typer.Exit(1)


def _say(text: str, style: str = "") -> None:
    """Prints foreign text on one line."""
    commands.say(" ".join(plain(text).split()), style)


def _print_file(file: FileDefects) -> None:
    columns = f"question in {file.question_column}, reference in {file.reference_column}"
    _say(f"{file.source}: {file.num_rows} rows, {columns}", "bold")
    if file.advice:
        _say(file.advice, "yellow")
    if not file.findings:
        _say("no defect found")
    for one in file.findings:
        more = ["..."] if len(one.rows) > MAX_EXAMPLES else []
        rows = ", ".join([*map(str, one.rows[:MAX_EXAMPLES]), *more])
        _say(f"- {len(one.rows)} x {one.kind} (row {rows}): {one.example[:100]}")


def _print_contamination(one: Contamination, train: str) -> None:
    found = Counter(overlap.how for overlap in one.overlaps)
    counts = ", ".join(f"{found[how]} {how}" for how in ("exact", "normalised", "near"))
    _say(
        f"{one.source}: {len(one.overlaps)} of {one.num_questions} questions stand in {train}"
        f" ({counts})",
        "bold red" if one.overlaps else "bold",
    )
    for overlap in one.overlaps[:MAX_EXAMPLES]:
        _say(
            f"- row {overlap.eval_row} = row {overlap.train_row}, {overlap.how},"
            f" {overlap.similarity:.2f}: {overlap.question[:100]}"
        )


@data_app.command()
def show(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help='.jsonl, .json, .csv, .parquet or "hub:NAME:CONFIG/SPLIT".'
        ),
    ],
    rows: Annotated[int, typer.Option(min=0, help="Number of rows.")] = 3,
    as_json: commands.AsJson = False,
) -> None:
    """Print columns, lengths and a few rows."""
    from treegraft.extras.data.check import view_file

    found = view_file(file, num=rows)
    if as_json:
        print(json.dumps(asdict(found), default=str))
        return
    asked, reference = found.question_column or "none found", found.reference_column or "none found"
    _say(
        f"{found.source}: {found.num_rows} rows; the question seems to be in {asked}, the reference"
        f" in {reference}",
        "bold",
    )
    names = ("column", "kind", "filled", "median", "95 %", "longest (characters)")
    columns = commands.table(*names, num_left=2)
    for one in found.columns:
        lengths = (one.num_filled, one.length_median, one.length_p95, one.length_max)
        columns.add_row(Text(plain(one.name)), ", ".join(one.kinds), *map(str, lengths))
    Console().print(columns)
    for row in found.rows:
        _say(f"row {row['row']}", "bold")
        for name, value in row["values"].items():
            is_text = isinstance(value, str)
            text = value if is_text else json.dumps(value, ensure_ascii=False, default=str)
            shown = Text(f"  {plain(name)}: ", "dim") + Text(plain(text, 600))
            Console().print(shown, soft_wrap=True)
    for problem in found.problems[:MAX_EXAMPLES]:
        _say(problem, "red")
