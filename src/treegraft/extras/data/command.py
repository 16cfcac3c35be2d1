"""`treegraft data check`: data sets inspected before use."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

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


@data_app.callback()
def data() -> None:
    """Inspect data before using it."""


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
