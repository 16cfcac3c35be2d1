"""The step that a reply of OpenAI's chat completions holds, whatever the marks of the model's
family: calls in their own field, or as JSON anywhere in the text; thoughts apart or in tags."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treegraft.core.chat_client import ChatReply
from treegraft.core.types import Observation, StepContent
from treegraft.rollout.formats.chat import ChatFormat, is_call
from treegraft.rollout.formats.markup import Violation
from treegraft.rollout.formats.template import THINK_CLOSING, THINK_OPENING

_DECODER = json.JSONDecoder()
_MARKS = r"<\|?tool_calls?\|?>|<\|python_tag\|>|\[TOOL_CALLS\]"
"""Marks before a call, of Hermes and Qwen, Phi, Llama, Mistral."""
_OPENED = re.compile(_MARKS)
_BETWEEN = re.compile(rf"(?:{_MARKS}|</tool_calls?>|<\|/tool_calls?\|>|```\w*|[\s,;\[\]])*")
_BEFORE_CALL = re.compile(rf"(?:{_MARKS}|```\w*|\[)\s*$")


@dataclass(frozen=True, slots=True)
class Said:
    """A reply that was read."""

    content: StepContent
    message: dict[str, Any]
    """The same as a message of the conversation; calls are in their own field, so that the server's
    template writes them in its own marks."""

    def results(self, shown: Sequence[Observation]) -> list[dict[str, Any]]:
        """Returns the messages that answer its calls."""
        calls = self.message.get("tool_calls", ())
        return [
            {"role": "tool", "tool_call_id": call["id"], "content": one.text}
            for call, one in zip(calls, shown, strict=True)
        ]


def read_reply(reply: ChatReply, format: ChatFormat, place: int) -> Said:
    """Returns the step of a reply. Text before a call is its thought; text behind it is left out.

    Args:
        format: says how calls become a tool's input, and where the answer stands.
        place: number of the reply in its conversation, for the ids of its calls.

    Raises:
        Violation: neither a call nor an answer, by the rules of the format.
    """
    thought, body = _split_thought(reply)
    found: list[Any] = list(reply.calls)
    before = body
    if not found:
        before, found = _calls_in(body)
    if found:
        calls = tuple(map(format.read_call, found))
        said = _joined(thought, before)
        fields = [_as_field(call, f"call{place:02d}{n:03d}") for n, call in enumerate(found)]
        message = {"role": "assistant", "content": before.strip() or None, "tool_calls": fields}
        return Said(StepContent(thought=said, calls=calls), message)
    if reply.is_cut:
        raise Violation("cut at its limit of tokens")
    if THINK_OPENING in body:
        raise Violation(f"a thought without {THINK_CLOSING}")
    if opened := _OPENED.search(body):
        raise Violation(f"{opened[0]} without a call in JSON")
    if not body.strip():
        raise Violation("neither a call nor an answer")
    before, answer = format.split_answer(body)
    content = StepContent(thought=_joined(thought, before), answer=answer)
    return Said(content, {"role": "assistant", "content": body})


def _split_thought(reply: ChatReply) -> tuple[str, str]:
    """The thought of a reply, and the rest of its text."""
    inner, closing, body = reply.text.rpartition(THINK_CLOSING)
    if not closing:
        inner, body = "", body
    return _joined(reply.reasoning, inner.replace(THINK_OPENING, "")), body


def _joined(*texts: str) -> str:
    return "\n".join(filter(None, map(str.strip, texts)))


def _calls_in(text: str) -> tuple[str, list[Any]]:
    """The text before the first call in a text, and all calls, as JSON objects."""
    calls: list[Any] = []
    before, place, last = text, 0, 0
    while (place := text.find("{", place)) >= 0:
        try:
            found, end = _DECODER.raw_decode(text, place)
        except (ValueError, RecursionError):
            place += 1
            continue
        # OpenAI's own shape, as some models write it.
        inner = found.get("function", found)
        if is_call(inner):
            if calls and not _BETWEEN.fullmatch(text, last, place):
                # Results that the model made up, and what it did with them.
                break
            before = before if calls else text[:place]
            calls.append(inner)
            last = end
        place = end
    while calls and (mark := _BEFORE_CALL.search(before)):
        before = before[: mark.start()]
    return before, calls


def _as_field(call: Mapping[str, Any], index: str) -> dict[str, Any]:
    arguments = call.get("arguments", call.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    function = {"name": call.get("name"), "arguments": text}
    return {"id": index, "type": "function", "function": function}


def with_thought(text: str, names: Sequence[str]) -> str:
    """Returns a reply in tags with the text before its first tag of these names as its thought."""
    opening = re.search(f"<(?:{'|'.join(map(re.escape, names))})>", text)
    before = text[: opening.start()] if opening else ""
    thought = _joined(*re.split(f"{THINK_OPENING}|{THINK_CLOSING}", before))
    if opening is None or not thought:
        return text
    return f"{THINK_OPENING}\n{thought}\n{THINK_CLOSING}\n{text[opening.start() :]}"


def shown_reply(reply: ChatReply) -> str:
    """Returns a reply as the server sent it, its parts one below the other."""
    calls = [json.dumps(call, ensure_ascii=False) for call in reply.calls]
    return _joined(reply.reasoning, reply.text, *calls)
