"""Trajectories as traces of verifiers, one a line: messages with their tokens, and rewards."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from treegraft import Origin, Status, Step, Trajectory, Tree
from treegraft.extras.formats.messages import results, written

VERSION = 1
"""Of the schema of traces in verifiers 0.4."""


def write_traces(path: Path, trees: Sequence[Tree], *, model: str, when: datetime) -> None:
    """Writes one trace for each leaf.

    Args:
        model: that of the run, as text.
        when: the time of all nodes, which records of trees do not have.
    """
    with path.open("w", encoding="utf-8") as file:
        for tree in trees:
            for one in tree.trajectories():
                line = json.dumps(trace(one, tree.group_id, model, when), default=str)
                file.write(f"{line}\n")


def trace(path: Trajectory, group_id: str, model: str, when: datetime) -> dict[str, Any]:
    """Returns a trajectory as a trace. Its advantages are those of tokens, of `credit`."""
    leaf, task = path.leaf, path.task
    failed = leaf.status is Status.FAILED
    data = {"prompt": task.question, "answer": "; ".join(task.reference)}
    scores = {} if leaf.reward is None else {"reward": {"score": leaf.reward, "weight": 1.0}}
    errors = [{"type": "failed", "message": leaf.error or ""}] if failed else []
    facts = {"group": group_id, "leaf": leaf.step_id, "weight": leaf.weight}
    return {
        "version": VERSION,
        "id": f"{group_id}/{leaf.step_id}",
        "task": {"type": "Task", "data": data, "key": task.id},
        "agent": {"config": {"model": model}, "name": "agent"},
        "nodes": list(_nodes(path, when.timestamp())),
        "rewards": scores,
        "metrics": {} if leaf.is_correct is None else {"correct": float(leaf.is_correct)},
        "info": {"treegraft": facts},
        "is_completed": True,
        "ok": not failed,
        "stop_condition": str(leaf.status),
        "errors": errors,
    }


def _nodes(path: Trajectory, when: float) -> Iterator[dict[str, Any]]:
    """Messages, each the child of the one before; the tokens of all are those of the path."""
    number = 0

    def node(message: dict[str, Any], ids: Sequence[int] = (), **more: Any) -> dict[str, Any]:
        nonlocal number
        given = {"parent": number - 1 if number else None, "message": message, "timestamp": when}
        number += 1
        columns = {"token_ids": list(ids), "mask": [False] * len(ids), "logprobs": []}
        return given | columns | more

    questions = path.task.conversation()
    for message in questions[:-1]:
        yield node(message)
    yield node(questions[-1], path.prompt_ids)
    credits, place = path.token_advantages, len(path.prompt_ids)
    for step in path.steps[1:]:
        size, cut = step.num_tokens, _end_of_own(step)
        ids, mask = step.token_ids.tolist(), step.loss_mask[:cut].tolist()
        taken = [n for n, one in enumerate(mask) if one]
        logprobs = step.sampling_logprobs.tolist()
        yield node(
            _message(written(step)),
            ids[:cut],
            sampled=step.num_sampled > 0,
            mask=mask,
            logprobs=[logprobs[n] for n in taken],
            advantages=[credits[place + n] for n in taken] if taken else None,
        )
        rest = ids[cut:]
        for message in results(step):
            yield node(message, rest)
            rest = []
        place += size


def _end_of_own(step: Step) -> int:
    """Where results of tools begin among the tokens of a step."""
    if not step.content.observations:
        return step.num_tokens
    is_result = step.origins == Origin.TOOL
    return int(is_result.argmax()) if is_result.any() else step.num_tokens


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """An assistant's message with calls as verifiers has them."""
    calls = [
        {"id": one["id"], "name": one["function"], "arguments": json.dumps(one["arguments"])}
        for one in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls or None}
