"""What formats of turns share: calls by name and arguments, messages, and foreign text in them."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Self, Unpack, cast

from treegraft.core.interfaces import Signature, Span, Tokenizer, Tool, signature_of
from treegraft.core.types import SYSTEM_ROLES, StepContent, Task, ToolCall
from treegraft.rollout.formats.answers import AnswerRule
from treegraft.rollout.formats.markup import (
    WITHHELD,
    FormatOptions,
    MarkedFormat,
    Specials,
    Violation,
    clean,
    framed_prompt,
    loosely,
    normal_answer,
    plain_text,
    with_texts,
)
from treegraft.rollout.formats.template import Call, arguments_of


class TurnFormat(MarkedFormat):
    """Steps as turns of a conversation, whose calls have names and arguments."""

    _mark: re.Pattern[str]
    """Finds the marks of turns, calls and results."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Sequence[Tool],
        template_options: Mapping[str, Any] | None = None,
        **options: Unpack[FormatOptions],
    ) -> None:
        super().__init__(tokenizer, tools, **options)
        self._template_options = template_options
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

    def _set_marks(self, marks: Iterable[str], own: Collection[str] = ()) -> None:
        """Fixes what foreign text must not hold; `own` are marks that the agent may write."""
        special = {self._decode([token]) for token in self._end_ids}
        special.update(getattr(self._tokenizer, "all_special_tokens", ()))
        found = {*filter(str.strip, marks)}
        self._specials = Specials(
            self._tokenizer, sorted((found - special) | {*own}), self._end_ids
        )
        longest_first = sorted(found, key=len, reverse=True)
        self._mark = re.compile("|".join(map(re.escape, longest_first)))
        self._forged = loosely(found)

    @abstractmethod
    def _step_ids(self, content: StepContent) -> list[int]:
        """The tokens of a step with calls or an answer. Raises ValueError for one that cannot be
        said."""

    @abstractmethod
    def _said(self, token_ids: Sequence[int]) -> tuple[str, str]:
        """The thought of a turn, and its text without thought and calls."""

    def render_step(self, content: StepContent) -> tuple[Span, ...]:
        """Returns the turn's policy tokens, end token included, then its results as tool tokens.

        Raises `ValueError` for a content that this format cannot say: marks or special tokens in
        its texts, calls and an answer at once or neither, an unknown tool, several calls where the
        template knows one a turn, an answer whose braces do not balance.
        """
        if bool(content.calls) == (content.answer is not None):
            answers = "no answer" if content.answer is None else "an answer"
            raise ValueError(
                f"a step has calls or an answer; got {len(content.calls)} calls and {answers}."
            )
        ids = self._step_ids(content)
        self._check_read_back(ids, content)
        return self._spans(ids, content.observations)

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

    def with_tools(self, schemas: Sequence[Mapping[str, Any]]) -> Self:
        """Returns the format of `Serving` for other tools. Raises `SettingError` for tools that the
        chat template cannot write."""
        return type(self)(
            self._tokenizer,
            [described_tool(**schema["function"]) for schema in schemas],
            template_options=self._template_options,
            system_prompt="",
            require_think=False,
            require_boxed=False,
            answer=AnswerRule("whole"),
            end_ids=sorted(self._end_ids),
        )

    @abstractmethod
    def _written(self, messages: list[dict[str, Any]]) -> str:
        """The text of a conversation and of the opening of the agent's turn."""

    def _asked_ids(self, task: Task) -> list[int]:
        return self._encode(self._written(self._messages(task)))

    def conversation_ids(
        self, messages: Sequence[Mapping[str, Any]], earlier: Iterable[tuple[str, Sequence[int]]]
    ) -> list[int]:
        """Returns the tokens of a conversation, as `Serving` says."""
        text = self._written([self._harmless(one) for one in messages])
        fitting = [one for one in earlier if text.startswith(one[0])]
        before, ids = max(fitting, key=lambda one: len(one[0]), default=("", ()))
        return [*ids, *self._encode(text[len(before) :])]

    def message(self, token_ids: Sequence[int], number: int) -> tuple[dict[str, Any], str | None]:
        """Returns a turn as a message and which rule it broke, as `Serving` says."""
        parsed = self.parse_step(token_ids)
        if parsed.violation is not None:
            return message_of(self.written_text(token_ids), "", (), number), parsed.violation
        thought, said = self._said(token_ids)
        calls = [(call.name, call.body) for call in parsed.content.calls]
        # OpenAI has no content beside calls alone.
        return message_of(said or (None if calls else ""), thought, calls, number), None

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens, special ones included."""
        return self._decode(token_ids)

    def _harmless(self, message: Mapping[str, Any]) -> dict[str, Any]:
        safe = self.sanitized if message["role"] == "tool" else self._specials.broken

        made: dict[str, Any] = with_texts(
            message, lambda text: safe(clean(text, keep_controls=True))
        )
        return made

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
