"""Trajectories from files: chat messages, conversations as ShareGPT has them, text in tags, rows of
steps, recorded trees. One bad line spoils no other.

    {"messages": [{"role": "user", "content": "r2 of e9 ?"},
                  {"role": "assistant", "content": "", "tool_calls": [...]}, ...]}
    {"conversations": [{"from": "human", "value": "r2 of e9 ?"},
                       {"from": "gpt", "value": "<search> e9 r2 </search><result> ..."}]}
    {"question": "r2 of e9 ?",
     "text": "<search> e9 r2 </search><result> r2 of e9 is e41 </result><answer> e41 </answer>"}
    {"question": "r2 of e9 ?", "steps": [{"calls": [{"name": "search", "body": "e9 r2"}],
                                          "observations": ["r2 of e9 is e41"]}]}

Tags are ours or Search-R1's. A row may have a "reward" and a "task_id". Of a run folder its trees
are read, and of each path the steps that the policy sampled.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any

from treegraft.core.errors import DataError, nearest_file
from treegraft.core.keyed import keyed_int
from treegraft.core.steps import read_steps, text_of
from treegraft.core.types import (
    SYSTEM_ROLES,
    Observation,
    Origin,
    Status,
    StepContent,
    ToolCall,
    Trace,
    Trajectory,
)
from treegraft.rollout.formats.markup import boxed, normal_answer
from treegraft.rollout.formats.tags import read_trajectory
from treegraft.runs.tree_files import TreePart, parts_in
from treegraft.runs.tree_json import tree_from_json
from treegraft.tasks.fields import ROLES, check_role, message_text
from treegraft.traces.buffer import TraceBuffer
from treegraft.traces.collect import StoredCounts
from treegraft.traces.keys import says_something, split_steps

_BAD_ROW = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)
"""Raised by reading a row of another shape."""
DEFAULT_REWARD = 1.0
"""Of rows without a reward."""
_OPENING = re.compile(r"\s*<[a-z_]+>")


@dataclass(frozen=True, slots=True)
class Problem:
    """A line that was left out. Problem(Path("x.jsonl"), 3, "no steps")"""

    path: Path
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}: {self.reason}"


@dataclass(slots=True)
class ImportReport(StoredCounts):
    """Counts of an import."""

    num_trajectories: int = 0
    """Read, stored or not."""
    problems: list[Problem] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """One trajectory of a file."""

    line: int
    question: str
    contents: tuple[StepContent, ...]
    is_kept: tuple[bool, ...]
    """Per step: whether it becomes a trace."""
    reward: float | None
    """None where the row has none."""
    task_id: str
    name: str
    """Unique within the source."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The conversation that ends with the question, of a recorded tree."""


def import_files(
    paths: Sequence[Path],
    buffer: TraceBuffer,
    *,
    source: str | None = None,
    num_best: int = 5,
    min_reward: float = 0.0,
) -> ImportReport:
    """Adds the trajectories of files and run folders to the buffer, each file in one go.

    Args:
        source: which agent wrote them; None for the name of each file or folder.
        num_best: trajectories stored of each task of a file, the best by reward, ties broken by the
            trajectories' names; rows without a task id are all stored.
        min_reward: only trajectories with a reward above it are stored.

    Raises:
        DataError: a path with nothing there to read.
    """
    check_paths(paths)
    report = ImportReport()
    for path in paths:
        name = source or path.resolve().name.removesuffix(".jsonl")
        traces: list[Trace] = []
        for one in _best(read_file(path, report), num_best, min_reward, report):
            traces += _traces(one, name)
        report.store(buffer, traces)
    return report


def check_lines(path: Path) -> None:
    """Raises DataError for a file with a line that is not a trajectory, or without any."""
    report = ImportReport()
    num = sum(1 for _ in read_file(path, report))
    if report.problems:
        more = f" There are {others} more." if (others := len(report.problems) - 1) else ""
        raise DataError(
            f"{report.problems[0]}. Correct the line or leave it out.{more}",
            code="import-line-invalid",
        )
    if not num:
        raise DataError(f"'{path}' is empty; expected JSONL of trajectories.", code="import-empty")


def check_paths(paths: Sequence[Path]) -> None:
    """Raises DataError for a path with nothing there to read."""
    for path in paths:
        if not path.exists():
            raise DataError(
                f"'{path}': there is no such file or folder; expected JSONL of trajectories, or a"
                f" run folder.{nearest_file(path)}",
                code="import-missing",
            )
        if path.is_dir() and not _parts(path):
            raise DataError(
                f"folder '{path}' has no trees of updates; expected the folder of a run that"
                " recorded its trees",
                code="import-folder-invalid",
            )


def _parts(path: Path) -> list[TreePart]:
    return parts_in(path / "trees" if (path / "trees").is_dir() else path, "update")


def _lines(path: Path) -> Iterator[tuple[Path, int, bytes]]:
    """The lines of a file or of a run's trees: where, with which number."""
    if path.is_dir():
        for part in _parts(path):
            place = part.path.with_name(f"{part.name}.jsonl")
            for number, line in part.lines():
                yield place, number + 1, line
        return
    # As bytes, so that one line that is not UTF-8 is a problem of that line alone.
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            yield path, number, line


def read_file(path: Path, report: ImportReport) -> Iterator[Read]:
    """Yields the trajectories of a file or run folder; lines that are none are the report's
    problems."""
    for file, number, line in _lines(path):
        # An empty last line is no row.
        if not line.strip():
            continue
        try:
            yield from _read_row(line.decode().strip(), file.stem, number)
        except _BAD_ROW as error:
            report.problems.append(Problem(file, number, _reason(error)))


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at column {error.colno}"
    # Its text is the key alone.
    if isinstance(error, KeyError):
        return f"no '{error.args[0]}'"
    return str(error).split("\n")[0] or type(error).__name__


def _read_row(line: str, stem: str, number: int) -> Iterator[Read]:
    row = json.loads(line)
    name = f"{stem}:{number}"
    if not isinstance(row, dict):
        raise ValueError(f"a {type(row).__name__}, expected an object")
    if "group_id" in row and "leaves" in row:
        for path in tree_from_json(line).trajectories():
            # Our fault ended it: it says nothing about the task.
            if path.status is not Status.FAILED:
                yield _of_path(path, number, name)
        return
    if "messages" in row or "conversations" in row:
        turns = row["messages"] if "messages" in row else _messages(row["conversations"])
        question, contents = read_messages(turns)
    elif "steps" in row:
        question = row["question"]
        contents = read_steps(row["steps"])
    elif "text" in row:
        question = row["question"]
        contents = read_trajectory(text_of(row["text"], "text"))
    else:
        raise ValueError("neither messages, conversations, steps nor text")
    reward = None if row.get("reward") is None else float(row["reward"])
    # JSON of Python has NaN, and no trajectory is better or worse than it.
    if reward is not None and not math.isfinite(reward):
        raise ValueError(f"the reward is {reward}, expected a finite number")
    task_id = row.get("task_id")
    if not text_of(question, "question").strip():
        raise ValueError("an empty question")
    for place, content in enumerate(contents, start=1):
        if not says_something(content):
            raise ValueError(f"step {place} says nothing")
    yield Read(
        line=number,
        question=question,
        contents=contents,
        is_kept=(True,) * len(contents),
        reward=reward,
        task_id="" if task_id is None else str(task_id),
        name=name,
    )


def _of_path(path: Trajectory, number: int, name: str) -> Read:
    steps = path.steps[1:]
    return Read(
        line=number,
        question=path.task.question,
        contents=tuple(step.content for step in steps),
        # A grafted step is another agent's; a step cut off before its call's result or its answer
        # leads nowhere.
        is_kept=tuple(
            step.origin is Origin.POLICY and bool(step.content.observations or step.content.answer)
            for step in steps
        ),
        reward=path.reward or 0.0,
        task_id=path.task.id,
        name=f"{name}:{path.leaf.step_id}",
        messages=path.task.messages,
    )


def _best(
    found: Iterator[Read], num_best: int, min_reward: float, report: ImportReport
) -> list[Read]:
    """Returns the trajectories to keep, in the order of the file."""

    def rank(numbered: tuple[int, Read]) -> tuple[float, int]:
        one = numbered[1]
        return -_reward(one), keyed_int(0, "tie", one.task_id, one.name)

    chosen: list[tuple[int, Read]] = []
    groups: dict[str, list[tuple[int, Read]]] = {}
    for number, one in enumerate(found):
        report.num_trajectories += 1
        if _reward(one) <= min_reward:
            report.num_too_low += 1
        elif not one.task_id:
            chosen.append((number, one))
        else:
            group = groups.setdefault(one.task_id, [])
            group.append((number, one))
            # Sorted as they come, so that a long run's trees are never all in memory.
            group.sort(key=rank)
            report.num_surplus += len(group) > num_best
            del group[num_best:]
    for group in groups.values():
        chosen += group
    chosen.sort(key=lambda numbered: numbered[0])
    return [one for _, one in chosen]


def _reward(found: Read) -> float:
    return DEFAULT_REWARD if found.reward is None else found.reward


def _traces(found: Read, source: str) -> Iterator[Trace]:
    # Files of one name in two folders have lines of one number; their contents tell their
    # trajectories apart.
    contents = repr((found.question, found.contents)).encode("utf-8", "replace")
    digest = hashlib.blake2b(contents, digest_size=4).hexdigest()
    split = split_steps(
        found.task_id,
        found.question,
        found.contents,
        reward=_reward(found),
        source=source,
        trajectory=f"{found.name}:{digest}",
    )
    # Split first: a step that is left out still belongs to the history of the later ones.
    return compress(split, found.is_kept)


# ---------------------------------------------------------------------- shapes of rows


_ROLES = {"human": "user", "gpt": "assistant"}
"""Of ShareGPT; "system" and the roles of chat messages are themselves."""


def _messages(turns: Any) -> list[dict[str, Any]]:
    """The turns of a conversation as ShareGPT has them, as chat messages."""
    found: list[dict[str, Any]] = []
    for turn in turns:
        check_role(turn["from"], (*_ROLES, *ROLES))
        found.append({"role": _ROLES.get(turn["from"], turn["from"]), "content": turn["value"]})
    return found


def read_messages(messages: Any) -> tuple[str, tuple[StepContent, ...]]:
    """Returns (question, steps) of a conversation in the shape of OpenAI's chat completions.

    Calls are `tool_calls` answered by messages of the role "tool", whose ids name their calls, or
    tags in an assistant's text answered by a user's. The last text of an assistant without a call
    is the answer.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: another shape, a second question, or no
            steps.
    """
    steps: list[StepContent] = []
    # Texts in tags are gathered until the next call or the end: a result comes in the message after
    # its call.
    tagged: list[str] = []

    def read_tags() -> None:
        if tagged:
            steps.extend(read_trajectory("\n".join(tagged)))
            tagged.clear()

    for message in messages:
        check_role(message["role"], ROLES)
    said = [one for one in messages if one["role"] not in SYSTEM_ROLES]
    if not said:
        raise ValueError("no question")
    if said[0]["role"] != "user":
        raise ValueError(
            f"the first message has the role {said[0]['role']!r}, expected the user's question"
        )
    question = message_text(said[0].get("content"))
    places = [n for n, one in enumerate(said) if one["role"] == "assistant"]
    place = 0
    while (place := place + 1) < len(said):
        message = said[place]
        role = message["role"]
        text = message_text(message.get("content"))
        if role == "assistant" and message.get("tool_calls"):
            first = place + 1
            while place + 1 < len(said) and said[place + 1]["role"] == "tool":
                place += 1
            read_tags()
            steps.append(_step_of_calls(message, text, said[first : place + 1]))
        elif role == "assistant":
            answer = _final_step(message, text) if place == places[-1] else None
            if answer is None:
                tagged.append(text)
            else:
                read_tags()
                steps.append(answer)
        # Search-R1 and others write results as the user's turns.
        elif role == "user" and tagged:
            result = text.strip().removeprefix("<information>").removesuffix("</information>")
            tagged.append(text if "<result>" in text else f"<result>{result}</result>")
        elif role == "user":
            raise ValueError(f"a second question, {text[:60]!r}; expected one question")
        else:
            raise ValueError("a tool's message without a call before it")
    read_tags()
    if not steps:
        raise ValueError("no steps")
    return question, tuple(steps)


def _thought(message: Mapping[str, Any], text: str) -> str:
    # Servers that return the thought apart from the text name it in one of two ways.
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    plain = text.replace("<think>", "").replace("</think>", "")
    return "\n".join(filter(None, (text_of(reasoning, "reasoning").strip(), plain.strip())))


def _final_step(message: Mapping[str, Any], text: str) -> StepContent | None:
    """A last message without tags after its thought is the answer; None for one with tags or
    without text."""
    before, _, answer = text.rpartition("</think>")
    if "</" in answer or _OPENING.match(answer) or not answer.strip():
        return None
    found = boxed(answer)
    return StepContent(
        thought=_thought(message, before), answer=normal_answer(answer if found is None else found)
    )


def _step_of_calls(
    message: Mapping[str, Any], text: str, results: list[Mapping[str, Any]]
) -> StepContent:
    """The step of a message with calls, and of the messages with their results."""
    calls: list[ToolCall] = []
    for call in message["tool_calls"]:
        function = call["function"]
        body = _body(function.get("arguments") or "")
        calls.append(ToolCall(text_of(function["name"], "name"), body))
    ids = [call.get("id") for call in message["tool_calls"]]
    names = [one.get("tool_call_id") for one in results]
    # Some files have no ids, and results in the order of the calls.
    if any(names) and names != ids[: len(names)]:
        raise ValueError(f"results of the calls {names}, expected them in the order {ids}")
    if len(results) > len(calls):
        raise ValueError("a tool's message without a call before it")
    return StepContent(
        thought=_thought(message, text),
        calls=tuple(calls),
        observations=tuple(Observation(text=message_text(one.get("content"))) for one in results),
    )


def _body(arguments: Any) -> str:
    """Returns a call's arguments as the one text that our tools take: a single argument bare,
    several as JSON."""
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return str(arguments)
    values = list(parsed.values()) if isinstance(parsed, dict) else []
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    # The text as it was written, where it was text: JSON made anew could differ in white space.
    return arguments if isinstance(arguments, str) else json.dumps(parsed, ensure_ascii=False)
