"""What formats of turns share: calls by name and arguments, messages, and foreign text in them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Unpack, cast

from treegraft.core.interfaces import Signature, Tokenizer, Tool, signature_of
from treegraft.core.types import SYSTEM_ROLES, StepContent, Task, ToolCall
from treegraft.rollout.formats.markup import (
    WITHHELD,
    FormatOptions,
    MarkedFormat,
    Violation,
    clean,
    framed_prompt,
    normal_answer,
    plain_text,
)
from treegraft.rollout.formats.template import Call, arguments_of


class TurnFormat(MarkedFormat):
    """Steps as turns of a conversation, whose calls have names and arguments."""

    _mark: re.Pattern[str]
    """Finds the marks of turns, calls and results."""

    def __init__(
        self, tokenizer: Tokenizer, tools: Sequence[Tool], **options: Unpack[FormatOptions]
    ) -> None:
        super().__init__(tokenizer, tools, **options)
        self._is_composed = options.get("system_prompt") is None
        self._has_rules = (
            self._require_think or self._require_boxed or options.get("mentions_retrieval", False)
        )
        self._signatures = {tool.name: signature_of(tool) for tool in tools}

    def _composed_prompt(self, tools: Sequence[Tool], *, mentions_retrieval: bool) -> str:
        # The template itself describes the tools.
        asks_for_box = self._require_boxed or self._answer_rule.kind == "boxed"
        answer = "the answer in \\boxed{...}" if asks_for_box else "the answer"
        line = f"Then give {answer}." if self._require_think else f"Give {answer}."
        if tools:
            line = (
                "Then either call tools and wait for what they return, or, once you know it, give"
                f" {answer}."
            )
        return framed_prompt(
            [line], self._require_think, asks_for_box, mentions_retrieval=mentions_retrieval
        )

    def _messages(self, task: Task) -> list[dict[str, Any]]:
        """The messages that ask the task's question."""
        has_system = bool(task.messages) and task.messages[0]["role"] in SYSTEM_ROLES
        # A composed prompt without a rule adds nothing to what the data themselves say.
        is_idle = has_system and self._is_composed and not self._has_rules
        return task.conversation("" if is_idle else self.system_prompt)

    def read_call(self, found: Any) -> ToolCall:
        """Returns the call of a JSON object, its body as its tool takes it.

        Raises Violation for an object without a name and arguments.
        """
        arguments = arguments_of(found) if isinstance(found, dict) else None
        name = found.get("name") if isinstance(found, dict) else None
        if arguments is None or not isinstance(name, str):
            raise Violation("a tool call without a name and arguments")
        name = clean(name, keep_controls=True)
        signature = self._signatures.get(name)
        text_parameter = signature.text_parameter if signature is not None else None
        if signature is None or text_parameter is None:
            return ToolCall(name, json_text(arguments))
        if not arguments and not signature.requires(text_parameter):
            return ToolCall(name, "")
        text = arguments.get(text_parameter)
        if len(arguments) == 1 and isinstance(text, str):
            return ToolCall(name, clean(text, keep_controls=True))
        problem = f'{name} takes {{"{text_parameter}": "..."}}, one text and nothing else'
        return ToolCall(name, json_text(arguments), problem)

    def _arguments(self, call: ToolCall) -> Call:
        """The name and the arguments of a call. Raises ValueError for an unknown tool or a body
        that is no object."""
        signature = self._signatures.get(call.name)
        if signature is None:
            known = ", ".join(self._signatures) or "none"
            raise ValueError(f"there is no tool '{call.name}' in this format; it knows {known}.")
        if signature.text_parameter is not None and call.problem is None:
            return call.name, {signature.text_parameter: clean(call.body, keep_controls=True)}
        try:
            found = json.loads(call.body)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"the call {call.body[:80]!r} of '{call.name}' is not JSON: {error}."
            ) from error
        names = list(signature.schema.get("properties", {}))
        if not isinstance(found, dict):
            if len(names) != 1:
                raise ValueError(f"the call {call.body[:80]!r} of '{call.name}' is no JSON object.")
            found = {names[0]: found}
        return call.name, found

    def _check_one_action(self, content: StepContent) -> None:
        """Raises ValueError for a step with calls and an answer, or neither."""
        if bool(content.calls) == (content.answer is not None):
            answers = "no answer" if content.answer is None else "an answer"
            raise ValueError(
                f"a step has calls or an answer; got {len(content.calls)} calls and {answers}."
            )

    def _check_read_back(self, ids: Sequence[int], content: StepContent) -> None:
        """Raises ValueError for a turn that is read as other content than it was written for."""
        parsed = self.parse_step(ids)
        said = parsed.content
        answer = content.answer
        if answer is not None:
            answer = normal_answer(clean(answer, keep_controls=True))
        thought = clean(content.thought, keep_controls=True).strip()
        # Compared, since a template is a program: it may trim, escape or leave out.
        calls = [*map(self._arguments, said.calls)]
        wanted = [*map(self._arguments, content.calls)]
        options = [(thought, answer)]
        if answer is not None and not self._answer_rule.looks_for_box:
            # Nothing parts a thought without tags from an answer without a box.
            options.append(("", "\n\n".join(filter(None, (thought, answer)))))
        is_same = (said.thought, said.answer) in options and calls == wanted
        if parsed.violation is not None or not is_same:
            reason = parsed.violation or "it is read back as something else"
            raise ValueError(
                f"the turn {self._decode(ids)[:80]!r} cannot be written in the chat template:"
                f" {reason}."
            )

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens, special ones included."""
        return self._decode(token_ids)

    def _harmless(self, message: Mapping[str, Any]) -> dict[str, Any]:
        safe = self.sanitized if message["role"] == "tool" else self._specials.broken

        def changed(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {changed(key): changed(one) for key, one in value.items()}
            if isinstance(value, list):
                return [*map(changed, value)]
            return safe(clean(value, keep_controls=True)) if isinstance(value, str) else value

        return cast(dict[str, Any], changed(message))

    def _harmless_ids(self, render: Callable[[Callable[[str], str]], Sequence[int]]) -> list[int]:
        """The tokens that `render` gives with foreign parts, each passed through the function
        that it receives, so that none forges anything."""
        # The whole text is rendered at once, since a template may change its parts by each other;
        # so marks are counted against those of a text that surely has none. Each attempt leaves
        # less of the foreign text: a normaliser can make marks of other characters.
        plain = list(render(lambda _: "x"))
        for safe in (self.sanitized, plain_text, lambda _: WITHHELD):
            ids = list(render(safe))
            if self._marks(ids) == self._marks(plain):
                return ids
        return plain

    def _marks(self, ids: Sequence[int]) -> tuple[list[int], list[str]]:
        """Every special token and every mark of a text, in order."""
        special = [token for token in ids if token in self._specials.ids_with_markup]
        return special, self._mark.findall(self._decode(ids))


def described_tool(
    name: str, description: str = "", parameters: Mapping[str, Any] | None = None
) -> Tool:
    """Returns a tool that only a prompt needs: its calls run elsewhere."""
    schema = parameters or {"type": "object", "properties": {}}
    signature = Signature(schema)
    return cast(Tool, SimpleNamespace(name=name, description=description, signature=signature))


def json_text(value: Any) -> str:
    """Returns a value as JSON that every tokenizer accepts."""
    return clean(json.dumps(value, ensure_ascii=False), keep_controls=True)


def tool_schema(tool: Tool) -> dict[str, Any]:
    """Returns the description of a tool as chat templates and OpenAI's requests take it."""
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": dict(signature_of(tool).schema),
    }
    return {"type": "function", "function": function}


def message_of(
    said: str | None, thought: str, calls: Sequence[tuple[str, Any]], number: int
) -> dict[str, Any]:
    """Returns a turn as a message of OpenAI's chat completions.

    Args:
        calls: names and arguments, as they come into the message.
        number: of the turn in its conversation; the ids of its calls depend on it.
    """
    message: dict[str, Any] = {"role": "assistant", "content": said}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call{number:03}{place:02}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for place, (name, arguments) in enumerate(calls)
        ]
    return message
