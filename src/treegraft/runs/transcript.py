"""One trajectory as text in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Protocol

from rich.table import Table
from rich.text import Text

from treegraft.core.text import plain
from treegraft.core.types import Origin, Status, Step, Trajectory, Tree

_STATUS_STYLE: Mapping[Status, str] = {
    Status.COMPLETED: "green",
    Status.TRUNCATED: "yellow",
    Status.FORMAT_VIOLATION: "red",
    Status.FAILED: "bold red",
}


class Decoder(Protocol):
    """Turns token ids into text."""

    def decode(self, token_ids: list[int]) -> str: ...


def unread(step: Step, tokenizer: Decoder | None) -> str:
    """Returns the text of a step that the format could not read, or its length if there is no
    tokenizer; empty for a step that could be read."""
    content = step.content
    is_empty = not content.thought.strip() and not content.calls and content.answer is None
    if tokenizer is not None and (step.violation is not None or is_empty):
        return tokenizer.decode(list(step.written_ids))
    if is_empty and step.violation is None:
        return f"{step.num_tokens} tokens that the format cannot read"
    return ""


def _parts(step: Step, tokenizer: Decoder | None) -> Iterator[tuple[str, str, str]]:
    """Yields label, text and style of each part of a step."""
    content = step.content
    if content.thought.strip():
        yield "think", content.thought, "dim"
    # A call that ended the trajectory has no result.
    for call, seen in zip_longest(content.calls, content.observations[: len(content.calls)]):
        yield call.name, call.body, "cyan"
        if seen is not None:
            marks = "[error] " * seen.is_error + "[cut] " * seen.is_truncated
            yield "result", f"{marks}{seen.text}", "red" if seen.is_error else "magenta"
    if content.answer is not None:
        yield "answer", content.answer, "bold green"
    if step.violation is not None:
        yield "violation", step.violation, "red"
    if written := unread(step, tokenizer):
        yield "wrote", written, "yellow"


def outcome(trajectory: Trajectory) -> str:
    """Returns how a trajectory ended, on one line: status, reward, advantage, what was expected."""
    leaf = trajectory.leaf
    parts = [str(leaf.status).replace("_", " ")]
    if leaf.reward is not None:
        parts.append(f"reward {leaf.reward:g}")
    if leaf.is_correct is not None:
        parts.append("correct" if leaf.is_correct else "wrong")
    if leaf.answer is not None and leaf.answer != trajectory.steps[-1].content.answer:
        parts.append(f"read as {plain(leaf.answer, 200)}")
    elif leaf.answer is None and leaf.status is Status.COMPLETED and leaf.is_correct is False:
        parts.append("no answer found in it")
    if leaf.advantage is not None:
        parts.append(f"advantage {leaf.advantage:+.2f}")
    if leaf.error:
        parts.append(plain(leaf.error, 300))
    if trajectory.task.reference and not leaf.is_correct:
        parts.append(f"expected {plain(' or '.join(trajectory.task.reference), 200)}")
    return ", ".join(parts)


def transcript(
    trajectory: Trajectory, tokenizer: Decoder | None = None, *, limit: int | None = None
) -> Table:
    """Returns a trajectory step by step: thoughts, calls, results, the answer, and how it ended.

    Args:
        tokenizer: shows the exact text of steps that the format could not read; None shows their
            length.
        limit: longest text of one part, in characters; None shows all.
    """
    grid = Table.grid(padding=(0, 1))
    # As wide as "violation", the longest label of ours; tools' names are cut.
    grid.add_column(width=9)
    grid.add_column(overflow="fold")

    def add(label: str, text: str, style: str, text_style: str = "") -> None:
        shown = Text(plain(label), style, no_wrap=True, overflow="ellipsis")
        grid.add_row(shown, Text(plain(text, limit), text_style))

    add("question", trajectory.task.question, "bold")
    for number, step in enumerate(trajectory.steps[1:], start=1):
        author = "" if step.origin is Origin.POLICY else step.origin.name.lower()
        add(f"step {number}", author, "bold blue", "bold blue")
        for label, text, style in _parts(step, tokenizer):
            add(label, text.strip(), style)
    style = _STATUS_STYLE[trajectory.leaf.status]
    grid.add_row(Text("ended", style), Text(outcome(trajectory), style))
    return grid


def pick_sample(tree: Tree) -> Trajectory | None:
    """Returns the trajectory with the highest reward, of equals the one with most calls, then the
    first; None of a tree without leaves."""

    def worth(trajectory: Trajectory) -> tuple[float, int]:
        reward = trajectory.reward
        return (float("-inf") if reward is None else reward), trajectory.num_tool_calls

    return max(tree.trajectories(), key=worth, default=None)
