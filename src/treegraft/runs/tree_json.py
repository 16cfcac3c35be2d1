"""Trees as JSON: a line of a record, a message between processes."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain, groupby, repeat
from typing import Any, get_args

import numpy as np

from treegraft.core.columns import FILLERS, Column, written_by
from treegraft.core.errors import DataError
from treegraft.core.files import parse_json
from treegraft.core.steps import observation_from
from treegraft.core.text import plain
from treegraft.core.types import (
    BranchCause,
    BranchDecision,
    BudgetState,
    Cause,
    EntropyKind,
    Leaf,
    Origin,
    Status,
    Step,
    StepContent,
    StopReason,
    Task,
    ToolCall,
    Tree,
)

CAUSES: Mapping[str, type[Any]] = {
    cause.__name__.removesuffix("Cause").lower(): cause for cause in get_args(Cause)
}
"""By the kinds that files name: "graft" for `GraftCause`."""
_KINDS = {cause: kind for kind, cause in CAUSES.items()}
DAMAGE = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
"""Errors that parsing a damaged line may raise."""


def tree_to_json(tree: Tree) -> str:
    """Returns a tree as one line; `tree_from_json` gives an equal tree back."""
    write = functools.partial(json.dumps, tree_to_dict(tree), separators=(",", ":"), default=str)
    text = write(ensure_ascii=False)
    # Lone surrogates, which data sets may hold, exist in no encoding; escaped they do.
    return write() if re.search("[\ud800-\udfff]", text) else text


def tree_to_dict(tree: Tree) -> dict[str, Any]:
    """Returns a tree as its line holds it; of its values `json.dumps` takes all with
    `default=str`."""
    return {
        "group_id": tree.group_id,
        "task": _task_to_dict(tree.task),
        "budget": asdict(tree.budget),
        "leaves": [asdict(leaf) for leaf in tree.leaves],
        "steps": [step_to_dict(step) for step in tree.steps],
    }


def task_to_json(task: Task) -> str:
    """Returns a task as a tree's line has it; of its columns, what JSON does not know as text."""
    return json.dumps(_task_to_dict(task), separators=(",", ":"), default=str)


def task_from_json(text: str) -> Task:
    """Returns the task that `task_to_json` wrote."""
    return _task_from_dict(json.loads(text))


def _task_from_dict(data: Mapping[str, Any]) -> Task:
    lists = {name: tuple(data.get(name, ())) for name in ("reference", "messages")}
    return Task(**{**data, **lists})


def _task_to_dict(task: Task) -> dict[str, Any]:
    data = asdict(task)
    # Tasks without messages are written as 0.6 did.
    if not task.messages:
        del data["messages"]
    return data


def _runs(values: Sequence[int]) -> list[list[int]]:
    """Run lengths: (1, 1, 1, 2) -> [[1, 3], [2, 1]]."""
    return [[int(value), len(list(group))] for value, group in groupby(values)]


def step_to_dict(step: Step) -> dict[str, Any]:
    """Returns a step as its file holds it: `origins` and `loss_mask` as [value, count] runs, the
    columns of `FILLERS` with entries for sampled tokens only."""
    cause = step.cause
    data: dict[str, Any] = {
        "id": step.id,
        "parent": step.parent,
        "depth": step.depth,
        "token_ids": step.token_ids.tolist(),
        "origins": _runs(step.origins.tolist()),
        "loss_mask": _runs(step.loss_mask.tolist()),
        "entropy_kind": step.entropy_kind,
        "temperature": step.temperature,
        "content": asdict(step.content),
        "stop_reason": step.stop_reason,
        "violation": step.violation,
        "policy_version": step.policy_version,
        "cause": None if cause is None else {"kind": _KINDS[type(cause)], **asdict(cause)},
        "decision": None if step.decision is None else asdict(step.decision),
        "lesson_ids": step.lesson_ids,
        "advantage": step.advantage,
    }
    # Prompts, results and grafts are most of the tokens; their fillers would double the file.
    for name in FILLERS:
        column = getattr(step, name)
        data[name] = None if column is None else column[step.sampled_mask].tolist()
    # Without factors a step is written as before there were any.
    if step.credit_factors is None:
        del data["credit_factors"]
    return data


def tree_from_json(line: str | bytes) -> Tree:
    """Returns the tree that `tree_to_json` wrote."""
    return tree_from_dict(parse_json(line))


def parse_tree(line: bytes, where: str) -> Tree:
    """Returns the tree of a line of a file.

    Raises:
        DataError: it is not a recorded tree; the message begins with `where`.
    """
    try:
        tree = tree_from_json(line)
        tree.trajectories()  # every leaf has its path
        return tree
    except DAMAGE as error:
        raise DataError(
            f"{where}: not a recorded tree ({plain(repr(error), 200)})", code="tree-unreadable"
        ) from error


def tree_from_dict(data: dict[str, Any]) -> Tree:
    """Returns the tree that `tree_to_dict` gave; takes `data` apart."""
    return Tree(
        task=_task_from_dict(data["task"]),
        group_id=data["group_id"],
        budget=BudgetState(**data["budget"]),
        leaves=tuple(Leaf(**{**one, "status": Status(one["status"])}) for one in data["leaves"]),
        # Numpy columns inside: lists of Python numbers take several times the memory.
        steps=tuple(_step_from_dict(step) for step in data["steps"]),
    )


def _expanded(runs: Sequence[Sequence[int]], kind: Callable[[int], int]) -> list[int]:
    """[[1, 3], [2, 1]] -> [1, 1, 1, 2], each value made a `kind`."""
    return [*chain.from_iterable(repeat(kind(value), count) for value, count in runs)]


def _columns_from_dict(data: dict[str, Any]) -> dict[str, Column | None]:
    """Takes the columns of a step out of its data."""
    num_tokens = len(data["token_ids"])
    runs = {"origins": data.pop("origins"), "loss_mask": data.pop("loss_mask")}
    for name, found in runs.items():
        # Before they are expanded: a damaged count would fill the memory.
        if sum(count for _, count in found) != num_tokens:
            raise ValueError(f"step '{data['id']}': {name} are not those of its tokens")
    origins = np.array(_expanded(runs["origins"], Origin), np.int8)
    is_sampled = written_by(origins, Origin.POLICY)
    columns: dict[str, Column | None] = {
        "token_ids": np.array(data.pop("token_ids")),
        "origins": origins,
        "loss_mask": np.array(_expanded(runs["loss_mask"], bool), np.bool_),
    }
    for name, filler in FILLERS.items():
        # Of factors nothing is written if there are none.
        values = data.pop(name, None)
        column = np.full(num_tokens, filler)
        if values is not None:
            if len(values) != np.count_nonzero(is_sampled):
                raise ValueError(
                    f"step '{data['id']}': {name} has {len(values)} entries for"
                    f" {np.count_nonzero(is_sampled)} sampled tokens"
                )
            column[is_sampled] = values
        # A file of another program may lack scores that a step always has.
        is_there = values is not None or name in ("sampling_logprobs", "entropies")
        columns[name] = column if is_there else None
    return columns


def _step_from_dict(data: dict[str, Any]) -> Step:
    columns = _columns_from_dict(data)
    content = data.pop("content")
    cause = data.pop("cause")
    decision = data.pop("decision")
    if decision is not None:
        seen = BranchCause(**decision["seen"])
        decision = BranchDecision(**{**decision, "seen": seen})
    return Step(
        **{
            **data,
            **columns,
            "lesson_ids": tuple(data["lesson_ids"]),
            "entropy_kind": EntropyKind(data["entropy_kind"]),
            "stop_reason": None if data["stop_reason"] is None else StopReason(data["stop_reason"]),
            "content": StepContent(
                thought=content["thought"],
                calls=tuple(ToolCall(**call) for call in content["calls"]),
                observations=tuple(map(observation_from, content["observations"])),
                answer=content["answer"],
            ),
            "cause": None if cause is None else CAUSES[cause.pop("kind")](**cause),
            "decision": decision,
        }
    )
