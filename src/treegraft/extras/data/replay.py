"""Gold traces are played again before a training: what the tools and environments of today return
is compared with what the traces say that they returned."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import fmean

from treegraft import Config, DataError, StepContent, Task, ToolUnavailable
from treegraft.parts import Finding, judging

_Trace = tuple[Task, tuple[StepContent, ...]]

NUM_TRACES = 8
"""Traces of each kind that are played, spread over the file."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What came of one trace."""

    num_calls: int = 0
    """Calls that were made, up to the first difference."""
    num_left_out: int = 0
    """Calls of remote tools, which are not made."""
    reward: float | None = None
    """Of the environment at the end; None without one, or after a difference."""
    difference: str = ""
    """The first one; empty where all results are as recorded."""


async def replayed(setup: judging.Parts) -> list[Finding]:
    """Returns for each source of gold traces that the recipe has, the tasks' expert, warmup.traces
    and buffer.path, how many of its first traces replay as recorded.

    Traces without results, as an expert's in an environment, differ where a call is an error.
    Remote tools are not asked.
    """
    found: list[Finding] = []
    for name, traces in _sources(setup):
        if isinstance(traces, str):
            found.append(Finding(name, "none to replay", note=traces, is_doubtful=True))
        elif traces:
            replays = [await replay(setup, *trace) for trace in traces]
            found.append(_finding(name, [task for task, _ in traces], replays))
    return found


async def replay(setup: judging.Parts, task: Task, steps: Sequence[StepContent]) -> Replay:
    """Returns what comes of a trace's calls in a fresh session, up to the first difference."""
    tools, num_calls, num_left_out = setup.toolbox.tools, 0, 0
    async with setup.toolbox.sessions(task) as sessions:
        try:
            await sessions.prepare(1)
            session = await sessions.start(0).open()
            for content in steps:
                for call, seen in zip_longest(content.calls, content.observations):
                    if call is None or getattr(tools.get(call.name), "is_remote", False):
                        num_left_out += call is not None
                        continue
                    num_calls += 1
                    came = await session.call(call)
                    is_same = (
                        not came.is_error
                        if seen is None
                        else came.text in (seen.text, judging.ended(seen.text))
                    )
                    if not is_same:
                        expected = "no error" if seen is None else f"{seen.text!r:.120}"
                        said = f"{call.name} {call.body.strip()!r:.60} gave {came.text!r:.120}"
                        said += f"; expected {expected}"
                        return Replay(num_calls, num_left_out, None, said)
            return Replay(num_calls, num_left_out, await session.reward())
        except ToolUnavailable as error:
            return Replay(num_calls, num_left_out, None, str(error))


def _sources(
    setup: judging.Parts,
) -> Iterator[tuple[str, list[_Trace] | str]]:
    """The sources by name, with the traces that are played, or why there are none."""
    config, tasks = setup.config, setup.train_tasks
    solved = [(task, judging.solution(setup.source, task, 0)) for task in tasks[:NUM_TRACES]]
    yield "the expert", [(task, steps) for task, steps in solved if steps]
    files: list[tuple[str, str]] = []
    if config.warmup.num_steps and config.warmup.traces not in ("expert", "buffer"):
        files.append(("warmup.traces", config.warmup.traces))
    if config.buffer.path not in ("", *judging.MADE_BY_RUN):
        files.append(("buffer.path", config.buffer.path))
    by_id = {task.id: task for task in tasks}
    by_question = {task.question: task for task in tasks}
    for name, path in files:
        place = Path(os.path.expandvars(path)).expanduser()
        try:
            stored = judging.read_demonstrations(
                place, Config().warmup, tasks, has_environment=setup.kind is not None
            ).demonstrations
        except DataError as error:
            yield name, str(error).removeprefix("warmup.traces ")
            continue
        spread = stored[:: max(1, len(stored) // NUM_TRACES)][:NUM_TRACES]
        # The recipe's own task, with its columns and without an environment's first observation.
        yield (
            name,
            [
                (by_id.get(task.id) or by_question.get(task.question, task), steps)
                for task, steps in spread
            ],
        )


def _finding(name: str, tasks: Sequence[Task], replays: Sequence[Replay]) -> Finding:
    same = [one for one in replays if not one.difference]
    value = f"{len(same)} of {len(replays)} traces replay as recorded"
    value += f" ({sum(one.num_calls for one in replays)} calls"
    if left_out := sum(one.num_left_out for one in replays):
        value += f"; {left_out} of remote tools not made"
    value += ")"
    rewards = [one.reward for one in same if one.reward is not None]
    value += f", mean reward of their ends {fmean(rewards):.3g}" if rewards else ""
    differing = [
        f"task '{task.id}': {one.difference}"
        for task, one in zip(tasks, replays, strict=True)
        if one.difference
    ]
    note = f"the first that differs, {differing[0]}; {_ADVICE}" if differing else ""
    return Finding(name, value, bool(same), note, bool(differing))


_ADVICE = (
    "the tools or the environment are no longer those of the traces. Restore them, or make the"
    " traces anew"
)
