"""The step in a server's reply: in the papers' tags, or as calls and texts in their own
fields of the reply."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from treegraft import StepContent
from treegraft.extras.chat import ChatReply
from treegraft.parts import Observation, agents, interfaces

Message = dict[str, Any]
_CALL_MARKS = re.compile(r"<\|?tool_calls?\|?>|<\|python_tag\|>|\[TOOL_CALLS\]")
"""Marks before a call, of Hermes and Qwen, Phi, Llama, Mistral."""


class TagProtocol:
    """Steps in the papers' tags, which the system prompt explains."""

    def __init__(self, format: agents.TagsFormat, system_prompt: str) -> None:
        """Takes the format that replies are read by; its tokenizer plays no part."""
        self.system_prompt = system_prompt
        self.stop: Sequence[str] = (*format.stop, *format.final)
        self.tools: Sequence[Message] = ()
        self._format = format
        # "</search>" without its marks is the tag's name.
        names = "|".join(re.escape(tag[2:-1]) for tag in self.stop)
        self._opening = re.compile(f"<(?:{names})>")

    def read(self, reply: ChatReply, place: int) -> tuple[StepContent, Message]:
        """Returns the step of a reply, and the same as a message of the conversation.

        Raises:
            Violation: neither a call nor an answer, by the rules of the format.
        """
        text = self._with_thought(self._whole_text(reply))
        parsed = self._format.parse_text(text)
        if parsed.violation is not None:
            raise agents.Violation(f"a reply not in the format: {parsed.violation}")
        if not parsed.is_complete:
            raise agents.Violation("a reply without a whole call or answer")
        return parsed.content, {"role": "assistant", "content": text}

    def results(self, message: Message, shown: Sequence[Observation]) -> list[Message]:
        """Returns the messages that answer the calls of a message."""
        texts = []
        for one in shown:
            # Sanitised: a result must not pose as a tag.
            text = self._format.sanitized(one.text)
            texts.append(f"<{agents.RESULT}>\n{text}\n</{agents.RESULT}>")
        return [{"role": "user", "content": "\n".join(texts)}]

    def _whole_text(self, reply: ChatReply) -> str:
        """The text of a reply up to its first closing tag, which servers leave out, or which they
        did not stop at."""
        text = reply.text
        if reply.reasoning and agents.THINK_OPENING not in text:
            text = f"{agents.THINK_OPENING}\n{reply.reasoning}\n{agents.THINK_CLOSING}\n{text}"
        ends = [text.find(tag) + len(tag) for tag in self.stop if tag in text]
        if ends:
            return text[: min(ends)]
        # The last tag that was opened is the one that the server stopped at.
        opened = re.findall(r"<([a-z_]+)>", text)
        closing = f"</{opened[-1]}>" if opened else ""
        return text + closing if closing in self.stop and not reply.is_cut else text

    def _with_thought(self, text: str) -> str:
        """The text with all that precedes its call or answer as the thought."""
        opening = self._opening.search(text)
        if opening is None:
            return text
        before = text[: opening.start()]
        rest = text[opening.start() :]
        thought = _joined(*re.split(f"{agents.THINK_OPENING}|{agents.THINK_CLOSING}", before))
        if not thought:
            return text
        return f"{agents.THINK_OPENING}\n{thought}\n{agents.THINK_CLOSING}\n{rest}"


class ToolCallProtocol:
    """Steps as the turns of a chat model: the request describes the tools, calls are in their own
    field of the reply, thoughts apart or in tags."""

    def __init__(self, format: agents.TurnFormat, tools: Sequence[interfaces.Tool]) -> None:
        """Takes the format that says how calls become a tool's input, and how answers look."""
        self.system_prompt = format.system_prompt
        self.stop: Sequence[str] = ()
        self.tools: Sequence[Message] = [agents.tool_schema(tool) for tool in tools]
        self._format = format

    def read(self, reply: ChatReply, place: int) -> tuple[StepContent, Message]:
        """Returns the step of a reply, and the same as a message of the conversation. Text beside
        a call is its thought.

        Args:
            place: number of the reply in its conversation, for the ids of its calls.

        Raises:
            Violation: neither a call nor an answer, by the rules of the format.
        """
        try:
            return self._read(reply, place)
        except agents.Violation as violation:
            raise agents.Violation(f"a reply not in the format: {violation}") from None

    def _read(self, reply: ChatReply, place: int) -> tuple[StepContent, Message]:
        inner, _, body = reply.text.rpartition(agents.THINK_CLOSING)
        thought = _joined(reply.reasoning, inner.replace(agents.THINK_OPENING, ""))
        if reply.calls:
            calls = tuple(map(self._format.read_call, reply.calls))
            fields = []
            for number, call in enumerate(reply.calls):
                # Nine letters and digits: Mistral's templates take no other id.
                name = f"call{place:02d}{number:03d}"
                fields.append({"id": name, "type": "function", "function": call})
            message = {"role": "assistant", "content": body.strip() or None, "tool_calls": fields}
            return StepContent(thought=_joined(thought, body), calls=calls), message
        # Before the marks: what is cut may lack anything.
        if reply.is_cut:
            raise agents.Violation("cut at its limit of tokens")
        if agents.THINK_OPENING in body:
            raise agents.Violation(f"a thought without {agents.THINK_CLOSING}")
        if opened := _CALL_MARKS.search(body):
            raise agents.Violation(
                f"{opened[0]} in its text; start the server with its parser of tool calls"
            )
        if not body.strip():
            raise agents.Violation("neither a call nor an answer")
        before, answer = self._format.split_answer(body)
        content = StepContent(thought=_joined(thought, before), answer=answer)
        return content, {"role": "assistant", "content": body}

    def results(self, message: Message, shown: Sequence[Observation]) -> list[Message]:
        """Returns the messages that answer the calls of a message."""
        found: list[Message] = []
        for call, one in zip(message["tool_calls"], shown, strict=True):
            found.append({"role": "tool", "tool_call_id": call["id"], "content": one.text})
        return found


def plain_text(reply: ChatReply) -> str:
    """Returns a reply as the server sent it, its parts one below the other."""
    calls = [json.dumps(call, ensure_ascii=False) for call in reply.calls]
    return _joined(reply.reasoning, reply.text, *calls)


def _joined(*texts: str) -> str:
    return "\n".join(filter(None, map(str.strip, texts)))
