"""Trees of trajectories that were not sampled here: demonstrations and other agents' attempts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from treegraft.core.errors import DataError, TreegraftError
from treegraft.core.interfaces import Span, TaskSource
from treegraft.core.text import describe
from treegraft.core.types import (
    ROOT_ID,
    ContextCause,
    Leaf,
    Origin,
    StartCause,
    Status,
    Step,
    StepContent,
    Task,
    ToolCall,
    Tree,
)

Demonstration = tuple[Task, tuple[StepContent, ...]]
Show = Callable[[Sequence[Demonstration]], Awaitable[list[Demonstration]]]
"""Plays demonstrations in environments and returns them as these show them."""


@dataclass(frozen=True, slots=True)
class Written:
    """A step and its tokens."""

    content: StepContent
    spans: Sequence[Span]
    loss_mask: tuple[bool, ...] | None = None
    """[tokens of all spans] those with loss; None: none."""
    context: Sequence[Span] = ()
    """The step as later ones see it, where that differs, with its results; empty where it does
    not."""


def tree_of_paths(
    task: Task,
    group_id: str,
    prompt_ids: Sequence[int],
    paths: Sequence[Sequence[Written]],
    environment_rewards: Sequence[float | None] | None = None,
    answer_of: Callable[[StepContent, Task], str | None] | None = None,
) -> Tree:
    """Returns completed trajectories as the separate paths of one tree, in their order, not scored.

    Args:
        environment_rewards: of each path; None without environments.
        answer_of: reads the answer of a last step; None takes it as it stands.
    """
    root = Written(StepContent(thought=task.question), [(tuple(prompt_ids), Origin.PROMPT)])
    steps = [plain_step(ROOT_ID, None, root)]
    # In the order of the paths, which callers compare with their own.
    leaves: list[Leaf] = []
    rewards = environment_rewards or [None] * len(paths)
    for start, (path, reward) in enumerate(zip(paths, rewards, strict=True)):
        before = parent = ROOT_ID
        for depth, written in enumerate(path):
            before = f"{before}.{0 if depth else start}"
            steps.append(plain_step(before, parent, written))
            if written.context:
                before = f"{before}.0"
                seen = plain_step(before, parent, Written(StepContent(), written.context))
                steps.append(replace(seen, cause=ContextCause()))
            parent = before
        last = path[-1].content
        leaf = Leaf(
            step_id=before,
            status=Status.COMPLETED,
            answer=answer_of(last, task) if answer_of else last.answer,
            weight=1.0 / len(paths),
            environment_reward=reward,
        )
        leaves.append(leaf)
    return Tree(task=task, group_id=group_id, steps=tuple(steps), leaves=tuple(leaves))


def plain_step(step_id: str, parent: str | None, written: Written) -> Step:
    """Returns a step without log-probabilities and entropies: zeros stand for them."""
    # Here, not at the head of the file: commands that read settings load it.
    import numpy as np

    token_ids = np.array([token for ids, _ in written.spans for token in ids])
    none = np.full(len(token_ids), False)
    # Nobody sampled these tokens here, and their own scores are not known.
    zeros = np.zeros(len(token_ids))
    return Step(
        id=step_id,
        parent=parent,
        depth=step_id.count("."),
        token_ids=token_ids,
        origins=np.array([origin for ids, origin in written.spans for _ in ids]),
        loss_mask=none if written.loss_mask is None else np.array(written.loss_mask, np.bool_),
        sampling_logprobs=zeros,
        entropies=zeros,
        content=written.content,
        cause=None if parent is None else StartCause(),
    )


def solution(source: TaskSource, task: Task, seed: int) -> tuple[StepContent, ...] | None:
    """Returns the steps of the tasks' scripted expert; None where there is no solution.

    Raises:
        DataError: the expert raised, or returned something else than steps.
    """
    place = f"the expert of the tasks, asked about task '{task.id}'"
    try:
        found = source.expert(task, seed)
        steps: tuple[Any, ...] | None = None if found is None else tuple(found)
    # Of a tool of ours that the expert calls: it says itself what is wrong.
    except TreegraftError:
        raise
    except Exception as error:
        raise DataError(
            f"{place}, raised {describe(error)}. Correct expert().", code="expert-raised"
        ) from error
    for step in steps or ():
        calls: Sequence[Any] = step.calls if isinstance(step, StepContent) else [step]
        for call in calls:
            if not isinstance(call, ToolCall) or not isinstance(call.body, str):
                raise DataError(
                    f"{place}, returned {call!r:.200}; expected steps such as"
                    " StepContent(calls=(ToolCall('search', 'e9 r5'),)), in which several arguments"
                    " are the text of a JSON object.",
                    code="expert-step-invalid",
                )
    return steps
