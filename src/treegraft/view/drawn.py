"""A tree or a trajectory as it shows itself: as text in print, as a drawing in a notebook."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Iterator, Sequence
from functools import cache
from html import escape
from itertools import zip_longest
from pathlib import Path

from rich.console import Console

from treegraft.core.text import plain
from treegraft.core.types import BranchCause, GraftCause, Leaf, Status, Step, Trajectory, Tree
from treegraft.runs.transcript import transcript, unread
from treegraft.view.branching import content_numbers, entropy_changes
from treegraft.view.pages import summarise
from treegraft.view.text import action, drawn, remarks

MOST_BYTES = 200_000
_SIZES = ((400, 1200), (150, 300), (40, 60))
"""Rows, and characters of the whole text of a step, of which the first that stay below the limit
are taken; the last always do."""
_LEAST_OPEN = 120
"""Letters of a step of a single trajectory that stands open."""
_COLOURS = {
    *("panel", "raised", "line", "text", "dim", "good", "bad", "warn"),
    *("prompt", "policy", "tool", "retrieved", "forced"),
}
_ENDS = {
    Status.TRUNCATED: "⋯ truncated",
    Status.FORMAT_VIOLATION: "! violation",
    Status.FAILED: "∅ failed",
}


def as_text(shown: Tree | Trajectory) -> str:
    """Returns what `treegraft view --text` prints: a tree with its best trajectory, or one
    trajectory."""
    width = shutil.get_terminal_size((100, 24)).columns
    # In a notebook rich would otherwise display it at once.
    console = Console(file=io.StringIO(), width=width, color_system=None, force_jupyter=False)
    console.print(drawn(shown) if isinstance(shown, Tree) else transcript(shown))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().rstrip()


def as_html(shown: Tree | Trajectory) -> str:
    """Returns the drawing for a notebook: HTML of at most `MOST_BYTES` bytes without any script,
    light or dark as the page is. It says so where it leaves something out."""
    tree, found = shown, ""
    if isinstance(tree, Trajectory):
        tree = Tree(task=tree.task, group_id="", steps=tree.steps, leaves=(tree.leaf,))
    for num_rows, num_letters in _SIZES:
        found = _page(tree, num_rows, num_letters, is_open=shown is not tree)
        if len(found.encode()) <= MOST_BYTES:
            break
    return found


@cache
def _style() -> str:
    folder = Path(__file__).with_name("static")
    pages = (folder / "style.css").read_text(encoding="utf-8")
    themes = {}
    for theme in ("light", "dark"):
        found = re.search(rf':root\[data-theme="{theme}"\] {{(.*?)}}', pages, re.S)
        assert found is not None
        pairs = re.findall(r"--(\w+): ([^;]+);", found[1])
        colours = "".join(f"--{name}:{value};" for name, value in pairs if name in _COLOURS)
        themes[theme] = f".treegraft{{{colours}color-scheme:{theme}}}"
    light, dark = themes["light"], themes["dark"]
    # Jupyter's own theme goes before that of the system.
    return (
        f"{light}@media (prefers-color-scheme:dark){{{dark}}}"
        f'[data-jp-theme-light="true"] {light}[data-jp-theme-light="false"] {dark}'
        f"{(folder / 'notebook.css').read_text(encoding='utf-8')}"
    )


def _tag(look: str, text: str, limit: int = 99, kind: str = "span") -> str:
    """An element with a foreign text in it, of which nothing can be read as markup."""
    whole = plain(text)
    shown = whole if len(whole) <= limit else f"{whole[:limit].rstrip()}…"
    return f'<{kind} class="{look}">{escape(shown)}</{kind}>'


def _page(tree: Tree, num_rows: int, num_letters: int, *, is_open: bool) -> str:
    facts = summarise(tree)
    said = [f"{facts['num_steps']} steps"]
    if len(tree.leaves) > 1:
        said.insert(0, f"{len(tree.leaves)} leaves")
    if facts["reward_mean"] is not None and len(tree.leaves) > 1:
        said += [f"mean reward {facts['reward_mean']:.3g}", f"{facts['num_correct']} right"]
    said += [
        f"{one}: {facts[f'num_{one}']}" for one in ("branches", "grafts") if facts[f"num_{one}"]
    ]
    if tree.task.reference:
        said.append(f"expected {' or '.join(tree.task.reference)}")
    authors = dict.fromkeys(step.origin.name.lower() for step in tree.steps[1:])
    if any(step.content.observations for step in tree.steps):
        authors["tool"] = None
    about = _tag("", " · ".join(said), 300) + "".join(_tag(one, one, kind="i") for one in authors)
    rows = "".join(_rows(tree, num_rows, num_letters, is_open=is_open))
    return (
        f'<div class="treegraft"><style>{_style()}</style>'
        f"{_tag('question', tree.task.question, 600, 'div')}"
        f'<div class="about">{about}</div>{rows}</div>'
    )


def _rows(tree: Tree, num_rows: int, num_letters: int, *, is_open: bool) -> Iterator[str]:
    """Yields the steps below the prompt. Those after a fork stand in a block for each child; equal
    siblings are drawn once, as in the viewer."""
    numbers, ends = content_numbers(tree), {leaf.step_id: leaf for leaf in tree.leaves}
    below: dict[str | None, list[Step]] = {}
    for step in tree.steps:
        below.setdefault(step.parent, []).append(step)

    def look(step: Step) -> tuple[object, ...]:
        kind = isinstance(step.cause, BranchCause), isinstance(step.cause, GraftCause)
        leaf = ends.get(step.id)
        end = leaf and (leaf.status, leaf.reward, leaf.advantage, leaf.is_correct)
        return numbers[step.id], kind, step.id in below, end

    # No recursion: a path may have more steps than Python has room for calls.
    waiting: list[str | tuple[list[Step], bool]] = [([tree.root], False)]
    num_left, is_cut, changes = num_rows, False, entropy_changes(tree, {})
    while waiting:
        if isinstance(item := waiting.pop(), str):
            yield item
            continue
        if is_cut := num_left == 0:
            break
        steps, is_forked = item
        if is_forked:
            yield '<div class="path">'
            waiting.append("</div>")
        if steps[0] is not tree.root:
            num_left -= 1
            own = [ends[one.id] for one in steps if one.id in ends]
            notes = list(remarks(steps[0], changes.get(steps[0].id)))
            yield _row(steps, notes, own, num_letters, is_open=is_open)
        groups: dict[tuple[object, ...], list[Step]] = {}
        for child in (child for one in steps for child in below.get(one.id, ())):
            groups.setdefault(look(child), []).append(child)
        waiting += [(group, len(groups) > 1) for group in reversed(groups.values())]
    yield from (item for item in reversed(waiting) if isinstance(item, str))
    if is_cut:
        yield f'<div class="more">shortened: {num_rows} rows are shown; the viewer has all</div>'


def _row(
    steps: Sequence[Step],
    notes: Sequence[tuple[str, str]],
    ends: Sequence[Leaf],
    num_letters: int,
    *,
    is_open: bool,
) -> str:
    step = steps[0]
    number = step.id if len(step.id) < 14 else f"{step.id[:11]}…"
    cells = [_tag("id", number), _tag("said", action(step, 999))]
    if len(steps) > 1:
        cells.append(_tag("times", f"\u00d7{len(steps)}"))
    if seen := step.content.observations:
        look = "seen error" if any(one.is_error for one in seen) else "seen"
        cells.append(_tag(look, " ".join(" ".join(one.text for one in seen).split()), 60))
    # The numbers behind a remark stand below, and what was decided against there alone.
    marks = [(re.split("[:,]", text)[0], style) for text, style in notes if style != "dim"]
    cells += [_tag(f"mark {style}", text) for text, style in marks]
    cells += [_end(ends[0])] if ends else []
    parts = list(_parts(step))
    body = plain("\n".join([*parts, *(text for text, _ in notes)]), num_letters)
    # What is short stands in the line above already.
    shown = " open" if is_open and len("".join(parts)) > _LEAST_OPEN else ""
    return (
        f'<details class="{step.origin.name.lower()}"{shown}><summary>{"".join(cells)}</summary>'
        f"{_tag('', body, len(body), 'pre')}</details>"
    )


def _end(leaf: Leaf) -> str:
    look = _ENDS.get(leaf.status, "· ended" if leaf.is_correct is None else "✗ wrong")
    look = "✓ right" if leaf.is_correct else look
    reward = "" if leaf.reward is None else f" · reward {leaf.reward:.3g}"
    advantage = "" if leaf.advantage is None else f" · advantage {leaf.advantage:+.2f}"
    return _tag(f"end {look.split()[1]}", f"{look}{reward}{advantage}")


def _parts(step: Step) -> Iterator[str]:
    """Yields all that a step says, part by part."""
    content = step.content
    if content.thought.strip():
        yield f"think: {content.thought.strip()}"
    for call, seen in zip_longest(content.calls, content.observations):
        if call is not None:
            yield f"{call.name}: {call.body.strip()}"
        if seen is not None:
            yield f"result: {seen.text}"
    if content.answer is not None:
        yield f"answer: {content.answer}"
    if step.violation is not None:
        yield f"violation: {step.violation}"
    if text := unread(step, None):
        yield text
    yield f"{step.num_tokens} tokens, {step.num_loss_tokens} with loss"
