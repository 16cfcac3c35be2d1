"""The retrieval key of a history, a trajectory split into traces under their keys, and read back.

    r5 of r2 of e9 ?           the question
    search e9 r2               the first step's call
    r2 of e9 is e41            and its result

A key holds no markup, so that an agent of any format finds the steps of agents of other formats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest

from treegraft.core.errors import DataError
from treegraft.core.types import StepContent, Task, Trace

OTHER_TASKS = "of other tasks than the recipe's training tasks, by id and question"


def retrieval_key(question: str, contents: Sequence[StepContent]) -> str:
    """Returns a history as text, the latest step last: the same for a trace that is stored and for
    a search.

    Lines are the question, then for each step its thought, and each call as "NAME BODY" followed by
    its result; empty ones are left out and white space within one is a single space, so that
    formats that strip or wrap differently give one key.
    """
    lines = [" ".join(question.split())]
    for one in contents:
        lines += step_lines(one)
    return "\n".join(filter(None, lines))


def asked_by(key: str) -> str:
    """Returns the name of the task of traces without a task id: the question of their key."""
    return "\n" + key.partition("\n")[0]


def step_lines(content: StepContent) -> list[str]:
    """Returns the lines of a key for one step."""
    lines = [content.thought]
    # A call that was cut off has no result; a step of another agent may have results without calls.
    for call, observation in zip_longest(content.calls, content.observations):
        lines += [f"{call.name} {call.body}"] if call is not None else []
        lines += [observation.text] if observation is not None else []
    return [flat for line in lines if (flat := " ".join(line.split()))]


def value_text(value: str | StepContent) -> str:
    """Returns the value of a trace as lines to be read, its answer at the end."""
    if isinstance(value, str):
        return value
    # The answer last, where a reader looks for it.
    answer = [] if value.answer is None else [f"answer {value.answer}"]
    return "\n".join([*step_lines(value), *answer])


def says_something(content: StepContent) -> bool:
    """Returns whether a step has any text; one without is of no use as a trace."""
    return bool(step_lines(content)) or bool((content.answer or "").strip())


def split_steps(
    task_id: str,
    question: str,
    contents: Sequence[StepContent],
    *,
    reward: float,
    source: str,
    trajectory: str,
    policy_version: int | None = None,
) -> list[Trace]:
    """Returns one trace per step: its history before as key (the question alone for the first), the
    step itself as value.

    Args:
        contents: the steps in order, results included.
        reward: of the whole trajectory.
        source: which agent wrote it.
        trajectory: its name, unique within that source and task.
        policy_version: of the policy being trained, where that wrote it; None for other agents.
    """
    traces: list[Trace] = []
    for position, content in enumerate(contents):
        key = retrieval_key(question, contents[:position])
        trace = Trace(
            key=key,
            value=content,
            reward=reward,
            source=source,
            task_id=task_id,
            position=position,
            terminal=content.answer is not None,
            trajectory=trajectory,
            policy_version=policy_version,
            # A key has single spaces; the warm-up has the question as it was.
            question="" if position or question == key else question,
        )
        traces.append(trace)
    return traces


def read_trajectory(
    traces: Sequence[Trace], tasks: Mapping[str, Task], *, has_environment: bool
) -> tuple[Task, tuple[StepContent, ...]] | str:
    """Returns the task and the steps of a stored trajectory, or why it cannot be used, as the end
    of "3 trajectories ...".

    Args:
        traces: in order.
        tasks: those that it may be of, by id.
        has_environment: of the tasks: a trajectory then may end without an answer, and its question
            is what the environment showed.
    """
    task = _task_of(traces[0], tasks, has_environment)
    steps = tuple(one.value for one in traces if isinstance(one.value, StepContent))
    if task is None:
        return OTHER_TASKS
    # A text has no parts that could be written in the agent's format.
    if len(steps) < len(traces):
        return "with a step that is kept as text alone"
    if [one.position for one in traces] != list(range(len(traces))):
        return "with a step missing"
    # Imitated, it would teach to stop without one.
    if steps[-1].answer is None and not has_environment:
        return "without an answer at the end"
    return task, steps


def _task_of(first: Trace, tasks: Mapping[str, Task], has_environment: bool) -> Task | None:
    """The task that a trajectory is of; None where the recipe does not train on it."""
    task = tasks.get(first.task_id)
    if task is None or first.position:
        return task
    if has_environment and first.question:
        return task.asking(first.question)
    # The first step's history is the question alone. Under another seed the same id may stand for
    # another question.
    if retrieval_key(task.question, ()) == first.key:
        return task
    return task.asking(first.key) if has_environment else None


def check_trace(trace: Trace, number: int) -> None:
    """Raises DataError for a trace that could not be found or used."""
    has_text = bool(value_text(trace.value).strip()) and bool(trace.key.strip())
    if not has_text or not math.isfinite(trace.reward) or trace.position < 0:
        raise DataError(
            f"trace {number} (source '{trace.source}', task '{trace.task_id}'): got the key"
            f" {trace.key!r:.60}, the reward {trace.reward}, the position {trace.position} and the"
            f" value {value_text(trace.value)!r:.60}; expected a key and a value with text, a"
            " finite reward and a position of 0 or more. Leave such steps out",
            code="trace-invalid",
        )
