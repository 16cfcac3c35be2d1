"""The viewer in a terminal and in the output of a notebook: the list of an update, one tree, one
trajectory."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text
from rich.tree import Tree as Drawing

from treegraft.core.errors import DataError
from treegraft.core.text import plain
from treegraft.core.types import (
    BranchCause,
    GraftCause,
    Leaf,
    RestartCause,
    RetryCause,
    Step,
    StoredCause,
    Trajectory,
    Tree,
)
from treegraft.runs.transcript import Decoder, transcript
from treegraft.view.branching import entropy_changes
from treegraft.view.pages import best_leaf, summarise
from treegraft.view.runs import RunReader

_PRE = '<pre style="white-space:pre;overflow-x:auto;line-height:1.3">{code}</pre>'
_STYLES = {
    "policy": "cyan",
    "retrieved": "magenta",
    "forced": "yellow",
    "prompt": "dim",
    "tool": "blue",
}

_COLUMNS = {
    "reward": "reward_mean",
    "min": "reward_min",
    "max": "reward_max",
    "correct": "num_correct",
    "leaves": "num_leaves",
    "branches": "num_branches",
    "grafts": "num_grafts",
    "errors": "num_errors",
    "longest": "longest",
}
"""Columns of a list of groups, and their keys in `pages.summarise`."""


def as_text(shown: Tree | Trajectory) -> str:
    """Returns what `treegraft view --text` prints: a tree with its best trajectory, or one
    trajectory."""
    console = _recorded(shown, shutil.get_terminal_size((100, 24)).columns)
    return console.export_text().rstrip()


def as_html(shown: Tree | Trajectory) -> str:
    """Returns the same for a notebook, in colours that can be read on light and on dark pages."""
    console = _recorded(shown, 120)
    return console.export_html(theme=SVG_EXPORT_THEME, code_format=_PRE, inline_styles=True)


def _recorded(shown: Tree | Trajectory, width: int) -> Console:
    # In a notebook rich would otherwise display it at once.
    console = Console(file=io.StringIO(), record=True, width=width, force_jupyter=False)
    console.print(drawn(shown) if isinstance(shown, Tree) else transcript(shown))
    return console


def pick_file(run: RunReader, update: int | None, evaluation: int | None) -> str:
    """Returns the name of a file of trees: of an update, of an evaluation after one, or the newest
    update's.

    Raises:
        DataError: there is none.
    """
    files = [file for file in run.files() if (file.kind == "update") is (evaluation is None)]
    asked = update if evaluation is None else evaluation
    wanted = [file.name for file in files if asked in (None, file.update)]
    if not wanted:
        kind = "update" if evaluation is None else "evaluation"
        if not files:
            raise DataError(
                f"run '{run.name}' recorded no trees of any {kind} yet", code="no-trees-yet"
            )
        span = f"{files[0].update} to {files[-1].update}"
        raise DataError(
            f"run '{run.name}' recorded no trees of {kind} {asked}; there are: {span}",
            code="update-without-trees",
        )
    # Of one number there may be two evaluations, greedy and sampled; the greedy one comes first.
    return wanted[-1] if asked is None else wanted[0]


def show(run: RunReader, file: str, group: int | None, leaf: int | None) -> RenderableType:
    """Returns the list of groups of a file; with `group` (from 0) its tree and best transcript,
    with `leaf` that transcript alone.

    Raises:
        DataError: there is no such group or leaf.
    """
    if group is None:
        return _list(run, file)
    if leaf is not None:
        run.path_of(file, group, leaf)  # raises if there is none
    tokens = run.tokens if run.tokens.is_there else None
    return drawn(run.tree(file, group), leaf, tokens, run.config())


def drawn(
    tree: Tree,
    leaf: int | None = None,
    tokens: Decoder | None = None,
    config: Mapping[str, Any] | None = None,
) -> RenderableType:
    """Returns a tree with the transcript of its best leaf, or that of `leaf` alone; without
    `tokens` a text that the format could not read is replaced by its length. `config` are the run's
    settings, see `entropy_changes`."""
    paths = tree.trajectories()
    chosen = leaf if leaf is not None else best_leaf(paths)
    parts: list[RenderableType] = []
    if leaf is None:
        changes = entropy_changes(tree, config or {})
        parts = [Text(_summary(tree, changes)), _drawing(tree, changes), Text("")]
    if chosen is not None:
        which = "" if leaf is not None else ", the best by reward"
        title = f"leaf {chosen} (0 to {len(tree.leaves) - 1}){which}"
        parts += [Text(title, style="bold"), transcript(paths[chosen], tokens)]
    return Group(*parts)


def _list(run: RunReader, file: str) -> Table:
    title = Text(plain(f"{run.name}, {file}"))
    table = Table(
        title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), header_style="dim"
    )
    for name in ("group", *_COLUMNS):
        # In 80 columns the question gives way.
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    table.add_column("question", overflow="ellipsis", no_wrap=True)
    for row in run.groups(file):
        numbers = [_number(row[key]) for key in _COLUMNS.values()]
        question = plain(" ".join(row["question"].split()), 200)
        table.add_row(str(row["n"]), *numbers, Text(question))
    return table


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.3g}"


def _summary(tree: Tree, changes: Mapping[str, Mapping[str, Any]]) -> str:
    """A tree in one line."""
    row = summarise(tree)
    parts = [
        f"{row['num_leaves']} leaves, {row['num_correct']} correct, mean reward"
        f" {_number(row['reward_mean'])}",
        f"{row['num_branches']} branches, {row['num_grafts']} grafts",
        f"{row['num_tokens']} tokens",
    ]
    if weighed := [step for step in tree.steps if step.decision is not None]:
        opened = sum(bool(step.decision and step.decision.num_opened) for step in weighed)
        parts.append(f"branched at {opened} of {len(weighed)} places that were weighed")
        seen = [changes[step.id]["change"] for step in weighed if step.id in changes]
        if seen:
            parts.append(f"entropy {min(seen):+.3g} to {max(seen):+.3g} nats a token")
    return "; ".join(parts)


def _drawing(tree: Tree, changes: Mapping[str, Mapping[str, Any]]) -> Drawing:
    leaves = {leaf.step_id: (number, leaf) for number, leaf in enumerate(tree.leaves)}
    root = Drawing(Text(plain(tree.task.question, 300), style="bold"))
    drawn = {tree.root.id: root}
    for step in tree.steps[1:]:
        drawn[step.id] = drawn[str(step.parent)].add(
            _label(step, leaves.get(step.id), changes.get(step.id))
        )
    return root


def _label(step: Step, leaf: tuple[int, Leaf] | None, change: Mapping[str, Any] | None) -> Text:
    author = step.origin.name.lower()
    text = Text()
    text.append(f"{step.id} ", style="dim")
    text.append(author, style=_STYLES[author])
    text.append(f" {step.num_tokens} tokens  {_action(step)}")
    for remark, style in _remarks(step, change):
        text.append(f"  {remark}", style=style)
    if leaf is not None:
        number, end = leaf
        style = "green" if end.is_correct else "red" if end.is_correct is False else "yellow"
        advantage = "" if end.advantage is None else f", advantage {end.advantage:+.2f}"
        text.append(
            f"  [leaf {number}: {end.status}, reward {_number(end.reward)}{advantage}]", style=style
        )
    return text


def _action(step: Step) -> str:
    """Returns what a step does, on one line: its calls or its answer, else its thought or the rule
    that it broke."""
    said = [f"{call.name} {call.body}" for call in step.content.calls]
    said += [] if step.content.answer is None else [f"answer {step.content.answer}"]
    text = " ".join(said) or step.content.thought or step.violation or ""
    return plain(" ".join(text.split()), 60)


def _remarks(step: Step, change: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    """Yields why a step is there, if it is no ordinary one, with a style; `change` is that of
    `entropy_changes`."""
    cause = step.cause
    entropy = "" if change is None else f"entropy {change['change']:+.3g} nats a token, "
    if isinstance(cause, BranchCause):
        # Tree-GRPO's rule compares no entropies.
        is_drawn = cause.rule == "random"
        why = "a further child of a finished step, drawn at random"
        yield f"branch: {why if is_drawn else f'{entropy}p {cause.probability:.3f}'}", "yellow"
    if isinstance(cause, GraftCause):
        yield f"graft from {plain(cause.source, 40)}, similarity {cause.similarity:.3f}", "magenta"
    if isinstance(cause, StoredCause):
        yield f"stored, from {plain(cause.source, 40)}", "magenta"
    if isinstance(cause, RestartCause):
        count = cause.num_steps
        why = f"{cause.rule}, below {count} stored step{'s' * (count != 1)}"
        yield f"begins here: {plain(why, 60)}", "cyan"
    if isinstance(cause, RetryCause):
        begun = "an answer" if step.content.answer is not None else "a call"
        yield f"{begun} forced beside {cause.beside}", "yellow"
