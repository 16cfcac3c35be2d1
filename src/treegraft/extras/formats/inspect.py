"""Trees as an evaluation log (.eval) of Inspect, whose viewer and readers open it."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

from treegraft import Status, Step, Trajectory, Tree
from treegraft.parts import BranchCause, GraftCause, RestartCause, RetryCause, StoredCause

VERSION = 2
"""Of Inspect's log format."""
_CAUSES: Mapping[type, str] = {
    GraftCause: "graft",
    StoredCause: "stored step",
    RestartCause: "restart",
    RetryCause: "retry",
}
"""Why a step is there, where that is no ordinary reason; branches are events of Inspect's own."""


def write_log(path: Path, trees: Sequence[Tree], *, model: str, name: str, when: datetime) -> None:
    """Writes one log: a sample for each task, an epoch for each of its leaves.

    Args:
        model: that of the run, as text.
        name: of the log's task.
        when: the time of all events, which records of trees do not have.
    """
    paths = [path for tree in trees for path in tree.trajectories()]
    epochs = [number for tree in trees for number, _ in enumerate(tree.leaves, start=1)]
    samples = [sample(one, epoch, model, when) for one, epoch in zip(paths, epochs, strict=True)]
    names = _names(trees)
    for one in samples:
        one["id"] = names[one["id"]]
    header = _header(trees, samples, model=model, name=name, when=when)
    summaries = [_summary(one) for one in samples]
    start = {"version": VERSION, "eval": header["eval"], "plan": header["plan"]}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("_journal/start.json", _json(start))
        for one in samples:
            archive.writestr(f"samples/{one['id']}_epoch_{one['epoch']}.json", _json(one))
        archive.writestr("summaries.json", _json(summaries))
        archive.writestr("header.json", _json(header))


def _names(trees: Sequence[Tree]) -> dict[str, str]:
    """A name for each task's id, without a slash, which would be a folder of the archive."""
    names: dict[str, str] = {}
    for own in dict.fromkeys(tree.task.id for tree in trees):
        name = own.replace("/", "_")
        while name in names.values():
            name += "_"
        names[own] = name
    return names


def _json(data: Any) -> str:
    return json.dumps(data, default=str)


def _header(
    trees: Sequence[Tree],
    samples: Sequence[Mapping[str, Any]],
    *,
    model: str,
    name: str,
    when: datetime,
) -> dict[str, Any]:
    names = _names(trees)
    rewards = [one["scores"]["reward"]["value"] for one in samples if "reward" in one["scores"]]
    metrics = {"mean": {"name": "mean", "value": fmean(rewards), "params": {}}} if rewards else {}
    score = {"name": "reward", "scorer": "reward", "params": {}, "metrics": metrics}
    return {
        "version": VERSION,
        "status": "success",
        "eval": {
            "eval_id": name,
            "run_id": name,
            "created": when.isoformat(),
            "task": name,
            "task_id": name,
            "dataset": {
                "name": "trees",
                "samples": len(trees),
                "sample_ids": [names[tree.task.id] for tree in trees],
            },
            "model": model,
            "config": {"epochs": max((len(tree.leaves) for tree in trees), default=1)},
        },
        "plan": {"name": "plan", "steps": [], "config": {}},
        "results": {
            "total_samples": len(samples),
            "completed_samples": len(samples),
            "scores": [score],
        },
        "stats": {"started_at": when.isoformat(), "completed_at": when.isoformat()},
    }


def _summary(one: Mapping[str, Any]) -> dict[str, Any]:
    names = ("id", "epoch", "input", "target", "scores", "metadata")
    done = {"completed": True, "message_count": len(one["messages"])}
    return {name: one[name] for name in names} | done


def sample(path: Trajectory, epoch: int, model: str, when: datetime) -> dict[str, Any]:
    """Returns a trajectory as Inspect's sample.

    Args:
        epoch: number of the leaf, from 1 on.
    """
    leaf, messages = path.leaf, conversation(path)
    for place, message in enumerate(messages):
        message["id"] = f"{leaf.step_id}-{place}"
    stop = "stop" if leaf.status is Status.COMPLETED else "max_tokens"
    last: Any = next((one for one in reversed(messages) if one["role"] == "assistant"), None)
    last = last or {"role": "assistant", "content": ""}
    scores: dict[str, Any] = {}
    if leaf.reward is not None:
        scores["reward"] = {"value": leaf.reward, "answer": leaf.answer}
    if leaf.is_correct is not None:
        scores["correct"] = {"value": "C" if leaf.is_correct else "I", "answer": leaf.answer}
    facts = {"leaf": leaf.step_id, "status": str(leaf.status), "weight": leaf.weight}
    facts |= {"advantage": leaf.advantage, "retrieved_frac": leaf.retrieved_frac}
    return {
        "id": path.task.id,
        "epoch": epoch,
        "input": path.task.question,
        "target": list(path.task.reference),
        "messages": messages,
        "output": {
            "model": model,
            "choices": [{"message": last, "stop_reason": stop}],
            "completion": last["content"],
        },
        "scores": scores,
        "metadata": facts,
        "store": {},
        "events": list(_timed(_events(path, model), path, when)),
        "model_usage": {},
        "attachments": {},
    } | ({"error": _error(leaf.error)} if leaf.error else {})


def _error(text: str) -> dict[str, str]:
    return {"message": text, "traceback": "", "traceback_ansi": ""}


def _timed(
    events: Iterator[dict[str, Any]], path: Trajectory, when: datetime
) -> Iterator[dict[str, Any]]:
    """The events a millisecond apart: the viewer puts them into the order of their times."""
    for place, event in enumerate(events):
        yield {
            "uuid": f"{path.task.id}-{path.leaf.step_id}-{place}",
            "timestamp": (when + timedelta(milliseconds=place)).isoformat(),
            "working_start": place / 1000,
            **event,
        }


def _events(path: Trajectory, model: str) -> Iterator[dict[str, Any]]:
    leaf = path.leaf
    for step in path.steps[1:]:
        yield from _of_step(step, model)
    for name, score in (("reward", leaf.reward), ("correct", leaf.is_correct)):
        if score is not None:
            value = {"value": score, "answer": leaf.answer}
            yield {"event": "score", "score": value, "scorer": name}


def _of_step(step: Step, model: str) -> Iterator[dict[str, Any]]:
    cause, inside = step.cause, {"span_id": f"step-{step.id}"}
    why = "branch" if isinstance(cause, BranchCause) else _CAUSES.get(type(cause))
    # The viewer shows names of spans, and branches as events only to who asks for all events.
    title = f"step {step.id}" + (f", {why}" if why else "")
    yield {"event": "span_begin", "id": f"step-{step.id}", "name": title} | inside
    if isinstance(cause, BranchCause):
        yield {
            "event": "branch",
            "from_anchor": str(step.parent),
            "metadata": asdict(cause),
        } | inside
    elif cause is not None and why is not None:
        data = {"kind": why, **asdict(cause)}
        yield {"event": "info", "source": f"treegraft: {why}", "data": data} | inside
    content = step.content
    if step.num_sampled:
        message = written(step)
        yield {
            "event": "model",
            "model": model,
            "input": [],
            "tools": [],
            "tool_choice": "auto",
            "config": {"temperature": step.temperature},
            "output": {"model": model, "choices": [{"message": message, "stop_reason": "stop"}]},
            "metadata": {"tokens": step.num_sampled, "policy_version": step.policy_version},
        } | inside
    for place, call in enumerate(content.calls):
        found = content.observations[place : place + 1]
        yield {
            "event": "tool",
            "id": f"{step.id}-{place}",
            "function": call.name,
            "arguments": {"input": call.body},
            "result": found[0].text if found else "",
        } | inside
    # What branches and other leaves begin at.
    yield {"event": "anchor", "anchor_id": step.id, "source": "treegraft"} | inside
    yield {"event": "span_end", "id": f"step-{step.id}"} | inside


# ------------------------------------------------------------------ messages


def conversation(path: Trajectory) -> list[dict[str, Any]]:
    """Returns the question, and each step with its results: messages of the roles system, user,
    assistant and tool."""
    messages = [dict(one) for one in path.task.conversation()]
    for step in path.steps[1:]:
        messages.append(written(step))
        seen = zip(step.content.observations, step.content.calls, strict=False)
        for place, (result, call) in enumerate(seen):
            messages.append(
                {
                    "role": "tool",
                    "content": result.text,
                    "tool_call_id": f"{step.id}-{place}",
                    "function": call.name,
                }
            )
    return messages


def written(step: Step) -> dict[str, Any]:
    """Returns what stands in a step before its results, as an assistant's message; of a graft what
    the other agent wrote."""
    content = step.content
    texts = [content.thought, "" if content.answer is None else content.answer]
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(filter(None, texts))}
    if content.calls:
        message["tool_calls"] = [
            {
                "id": f"{step.id}-{place}",
                "type": "function",
                "function": call.name,
                "arguments": {"input": call.body},
            }
            for place, call in enumerate(content.calls)
        ]
    return message
