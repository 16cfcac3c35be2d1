"""One trajectory as text in a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress
from typing import Protocol

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from treegraft.core.text import plain
from treegraft.core.types import Observation, Origin, Status, Step, StepContent, Trajectory, Tree

_STATUS_STYLE: Mapping[Status, str] = {
    Status.COMPLETED: "green",
    Status.TRUNCATED: "yellow",
    Status.FORMAT_VIOLATION: "red",
    Status.FAILED: "bold red",
}


class Decoder(Protocol):
    """Turns token ids into text."""

    def decode(self, token_ids: list[int]) -> str: ...


def _labelled(label: str, body: str, style: str) -> Table:
    """Returns a label with its text in a column beside it."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=9, style=style)
    grid.add_column(overflow="fold")
    grid.add_row(Text(label, overflow="ellipsis", no_wrap=True), Text(body))
    return grid


def _observation(observation: Observation, limit: int | None) -> Table:
    flags = (observation.is_error, observation.is_truncated)
    marks = list(compress(("error", "cut"), flags))
    body = plain(observation.text, limit) + (f"  [{', '.join(marks)}]" if marks else "")
    return _labelled("result", body, "red" if observation.is_error else "magenta")


def _content(content: StepContent, limit: int | None) -> list[RenderableType]:
    parts: list[RenderableType] = []
    if content.thought.strip():
        parts.append(_labelled("think", plain(content.thought.strip(), limit), "dim"))
    for place, call in enumerate(content.calls):
        parts.append(_labelled(plain(call.name), plain(call.body.strip(), limit), "cyan"))
        if place < len(content.observations):
            parts.append(_observation(content.observations[place], limit))
    if content.answer is not None:
        parts.append(_labelled("answer", plain(content.answer, limit), "bold green"))
    return parts


def _step(step: Step, tokenizer: Decoder | None, limit: int | None) -> list[RenderableType]:
    parts = _content(step.content, limit)
    if step.violation is not None:
        parts.append(_labelled("violation", plain(step.violation), "red"))
    if written := unread(step, tokenizer):
        parts.append(_labelled("wrote", plain(written, limit), "yellow"))
    return parts


def unread(step: Step, tokenizer: Decoder | None) -> str:
    """Returns the text of a step that the format could not read, or its length where there is no
    tokenizer; empty for a step that could be read."""
    content = step.content
    is_empty = not content.thought.strip() and not content.calls and content.answer is None
    if tokenizer is not None and (step.violation is not None or is_empty):
        return tokenizer.decode(list(step.written_ids))
    is_told = not is_empty or step.violation is not None
    return "" if is_told else f"{step.num_tokens} tokens that the format cannot read"


def outcome(trajectory: Trajectory) -> Text:
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
    return Text(", ".join(parts), style=_STATUS_STYLE[leaf.status])


def transcript(
    trajectory: Trajectory, tokenizer: Decoder | None = None, *, limit: int | None = None
) -> RenderableType:
    """Returns a trajectory step by step: thoughts, calls, results, the answer, and how it ended.

    Args:
        tokenizer: shows the exact text of steps that the format could not read; None shows their
            length.
        limit: longest text of one part, in characters; None shows all.
    """
    parts: list[RenderableType] = [
        _labelled("question", plain(trajectory.task.question, limit), "bold")
    ]
    for number, step in enumerate(trajectory.steps[1:], start=1):
        author = "" if step.origin is Origin.POLICY else f", {step.origin.name.lower()}"
        parts.append(Text(f"step {number}{author}", style="bold blue"))
        parts.extend(_step(step, tokenizer, limit))
    parts.append(outcome(trajectory))
    return Group(*parts)


def pick_sample(tree: Tree) -> Trajectory | None:
    """Returns the trajectory with the highest reward, of equals the one with most calls, then the
    first; None of a tree without leaves."""
    trajectories = tree.trajectories()
    if not trajectories:
        return None
    return max(
        trajectories,
        key=lambda t: (t.reward if t.reward is not None else float("-inf"), t.num_tool_calls),
    )
