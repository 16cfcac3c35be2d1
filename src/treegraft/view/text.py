"""The viewer in a terminal: the list of an update, one tree, one trajectory."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
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
    Tree,
)
from treegraft.runs.transcript import transcript
from treegraft.view.pages import best_leaf
from treegraft.view.runs import RunReader

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
            raise DataError(f"run '{run.name}' recorded no trees of any {kind} yet")
        span = f"{files[0].update} to {files[-1].update}"
        raise DataError(f"run '{run.name}' recorded no trees of {kind} {asked}; there are: {span}")
    # Of one number there may be two evaluations, greedy and sampled; the greedy one comes first.
    return wanted[-1] if asked is None else wanted[0]


def show(run: RunReader, file: str, group: int | None, leaf: int | None) -> RenderableType:
    """Returns the list of groups of a file; with `group` (from 0) its tree and best transcript,
    with `leaf` that transcript.

    Raises:
        DataError: there is no such group or leaf.
    """
    if group is None:
        return _list(run, file)
    tree = run.tree(file, group)
    if leaf is not None and not 0 <= leaf < len(tree.leaves):
        raise DataError(
            f"group {group} of '{file}' has {len(tree.leaves)} leaves, 0 to {len(tree.leaves) - 1};"
            f" there is no leaf {leaf}"
        )
    paths, tokens = tree.trajectories(), run.tokens
    chosen = leaf if leaf is not None else best_leaf(paths)
    parts: list[RenderableType] = [] if leaf is not None else [_drawing(tree), Text("")]
    if chosen is not None:
        which = "" if leaf is not None else ", the best by reward"
        title = f"leaf {chosen} (0 to {len(tree.leaves) - 1}){which}"
        written = transcript(paths[chosen], tokens if tokens.is_there else None)
        parts += [Text(title, style="bold"), written]
    return Group(*parts)


def _list(run: RunReader, file: str) -> Table:
    title = Text(f"{run.name}, {file}")
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


def _drawing(tree: Tree) -> Drawing:
    leaves = {leaf.step_id: (number, leaf) for number, leaf in enumerate(tree.leaves)}
    root = Drawing(Text(plain(tree.task.question, 300), style="bold"))
    drawn = {tree.root.id: root}
    for step in tree.steps[1:]:
        drawn[step.id] = drawn[str(step.parent)].add(_label(step, leaves.get(step.id)))
    return root


def _label(step: Step, leaf: tuple[int, Leaf] | None) -> Text:
    said = [f"{call.name} {call.body}" for call in step.content.calls]
    said += [] if step.content.answer is None else [f"answer {step.content.answer}"]
    author = step.origin.name.lower()
    text = Text(f"{step.id} ", style="dim")
    text.append(author, style=_STYLES[author])
    text.append(
        f" {len(step.token_ids)} tokens "
        f" {plain(' '.join(' '.join(said).split()) or step.content.thought, 60)}"
    )
    if isinstance(step.cause, BranchCause):
        numbers = f"entropy change {step.cause.entropy_change:+.4g}, p {step.cause.probability:.3f}"
        # Tree-GRPO's rule compares no entropies.
        is_drawn = step.cause.rule == "random"
        why = "a further child of a finished step, drawn at random" if is_drawn else numbers
        text.append(f"  branch: {why}", style="yellow")
    if (decision := step.decision) is not None and decision.num_opened < max(
        1, decision.num_wanted
    ):
        why = "the budget was spent" if decision.num_wanted else "the rule said no"
        seen = decision.seen
        bar = "" if seen.bar is None else f", to exceed {seen.bar:.3f}"
        text.append(
            f"  no branch, {why}: entropy change {seen.entropy_change:+.4g}, p"
            f" {seen.probability:.3f}{bar}",
            style="dim",
        )
    if isinstance(step.cause, GraftCause):
        text.append(
            f"  graft from {plain(step.cause.source, 40)}, similarity {step.cause.similarity:.3f}",
            style="magenta",
        )
    if isinstance(step.cause, StoredCause):
        text.append(f"  stored, from {plain(step.cause.source, 40)}", style="magenta")
    if isinstance(step.cause, RestartCause):
        count = step.cause.num_steps
        why = f"{step.cause.rule}, below {count} stored step{'s' * (count != 1)}"
        text.append(f"  begins here: {plain(why, 60)}", style="cyan")
    if isinstance(step.cause, RetryCause):
        begun = "an answer" if step.content.answer is not None else "a call"
        text.append(f"  {begun} forced, with the thought of {step.cause.beside}", style="yellow")
    if leaf is not None:
        number, end = leaf
        style = "green" if end.is_correct else "red" if end.is_correct is False else "yellow"
        advantage = "" if end.advantage is None else f", advantage {end.advantage:+.2f}"
        text.append(
            f"  [leaf {number}: {end.status}, reward {_number(end.reward)}{advantage}]", style=style
        )
    return text
