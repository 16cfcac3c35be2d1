"""The viewer in a terminal and in the output of a notebook: one tree, one trajectory."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text
from rich.tree import Tree as Drawing

from treegraft.core.errors import DataError
from treegraft.core.text import plain
from treegraft.core.types import (
    BranchCause,
    ContextCause,
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
from treegraft.view.pages import best_leaf, summarise
from treegraft.view.runs import RunReader

_PRE = '<pre style="white-space:pre;overflow-x:auto;line-height:1.3">{code}</pre>'
_STYLES = {
    "policy": "cyan",
    "retrieved": "magenta",
    "forced": "yellow",
    "prompt": "dim",
    "tool": "blue",
    "context": "dim",
}


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


def show(run: RunReader, place: str) -> RenderableType:
    """Returns a tree with its best transcript, or the transcript of one leaf.

    Args:
        place: as in the addresses of the pages, "update-000004/0" or "update-000004/0/2"; "newest"
            for the first tree of the newest update.

    Raises:
        DataError: there is no such tree or leaf.
    """
    if place == "newest":
        updates = [file.name for file in run.files() if file.kind == "update"]
        if not updates:
            raise DataError(f"run '{run.name}' recorded no trees yet", code="no-trees-yet")
        place = f"{updates[-1]}/0"
    name, *numbers = place.split("/")
    if len(numbers) not in (1, 2) or not all(re.fullmatch("[0-9]{1,9}", one) for one in numbers):
        raise DataError(
            f"--text: got '{place:.80}', expected 'newest', a tree such as update-000004/0, or a"
            " leaf such as update-000004/0/2",
            code="no-such-tree",
        )
    tokens = run.tokens if run.tokens.is_there else None
    number, *leaf = map(int, numbers)
    if leaf:
        return transcript(run.path_of(name, number, leaf[0]), tokens)
    return drawn(run.tree(name, number), tokens)


def drawn(tree: Tree, tokens: Decoder | None = None) -> RenderableType:
    """Returns a tree with the transcript of its best leaf; without `tokens` a text that the format
    could not read is replaced by its length."""
    paths = tree.trajectories()
    best = best_leaf(paths)
    parts: list[RenderableType] = [Text(_summary(tree)), _drawing(tree), Text("")]
    if best is not None:
        title = f"leaf {best} (0 to {len(tree.leaves) - 1}), the best by reward"
        parts += [Text(title, style="bold"), transcript(paths[best], tokens)]
    return Group(*parts)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _summary(tree: Tree) -> str:
    """A tree in one line."""
    row = summarise(tree)
    parts = [
        f"{row['num_leaves']} leaves, {row['num_correct']} correct, mean reward"
        f" {_number(row['reward_mean'])}",
        f"{row['num_branches']} branches, {row['num_grafts']} grafts",
        f"{row['num_tokens']} tokens",
    ]
    return "; ".join(parts)


def _drawing(tree: Tree) -> Drawing:
    leaves = {leaf.step_id: (number, leaf) for number, leaf in enumerate(tree.leaves)}
    root = Drawing(Text(plain(tree.task.question, 300), style="bold"))
    drawn = {tree.root.id: root}
    for step in tree.steps[1:]:
        # Parents come before their children in a tree's steps.
        drawn[step.id] = drawn[str(step.before)].add(_label(step, leaves.get(step.id)))
    return root


def _label(step: Step, leaf: tuple[int, Leaf] | None) -> Text:
    author = step.origin.name.lower()
    text = Text()
    text.append(f"{step.id} ", style="dim")
    text.append(author, style=_STYLES[author])
    text.append(f" {step.num_tokens} tokens  {_action(step)}")
    for remark, style in _remarks(step):
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


def _remarks(step: Step) -> Iterator[tuple[str, str]]:
    """Yields why a step is there, if it is no ordinary one, with a style."""
    cause = step.cause
    if isinstance(cause, BranchCause):
        # Tree-GRPO's rule compares no entropies.
        is_drawn = cause.rule == "random"
        why = "a further child of a finished step, drawn at random"
        yield f"branch: {why if is_drawn else f'p {cause.probability:.3f}'}", "yellow"
    if isinstance(cause, GraftCause):
        yield f"graft from {plain(cause.source, 40)}, similarity {cause.similarity:.3f}", "magenta"
    if isinstance(cause, ContextCause):
        yield f"seen from here on, after {step.parent or 'nothing'}", "dim"
    if isinstance(cause, StoredCause):
        yield f"stored, from {plain(cause.source, 40)}", "magenta"
    if isinstance(cause, RestartCause):
        why = f"{cause.rule}, stored steps above: {cause.num_steps}"
        yield f"begins here: {plain(why, 60)}", "cyan"
    if isinstance(cause, RetryCause):
        yield f"its opening is forced, after that of {cause.beside}", "yellow"
