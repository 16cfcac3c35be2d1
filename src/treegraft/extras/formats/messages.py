"""A trajectory as messages, as OpenAI's chat interface has them."""

from __future__ import annotations

from typing import Any

from treegraft import Step, Trajectory


def conversation(path: Trajectory) -> list[dict[str, Any]]:
    """Returns the question, and each step with its results: messages of the roles system, user,
    assistant and tool."""
    messages = [dict(one) for one in path.task.conversation()]
    for step in path.steps[1:]:
        messages.append(written(step))
        for message, call in zip(results(step), step.content.calls, strict=False):
            messages.append({**message, "function": call.name})
    return messages


def results(step: Step) -> list[dict[str, Any]]:
    """Returns the results of a step's calls as messages."""
    return [
        {"role": "tool", "content": seen.text, "tool_call_id": f"{step.id}-{place}"}
        for place, seen in enumerate(step.content.observations)
    ]


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
