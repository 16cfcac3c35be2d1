"""The model's own format: turns, tool calls and results as its chat template writes them.

    <think> ... </think> text              one turn of the agent: a thought, then
    <tool_call>{"name": ...}</tool_call>   one or more calls, in whatever marks the template has, or
    ... \\boxed{...}                        the answer: a turn without calls
    <retrieve> ... </retrieve>             another agent's steps, at the beginning of a turn

Tokens are appended and never rendered again: `ChatTemplate` gives the text between two turns. Text
from elsewhere is encoded so that it holds no mark and no special token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from treegraft.core.interfaces import Span, Tokenizer, Tool
from treegraft.core.types import (
    Observation,
    Origin,
    ParsedStep,
    StepContent,
    ToolCall,
)
from treegraft.rollout.formats.markup import (
    FormatOptions,
    Violation,
    clean,
    normal_answer,
)
from treegraft.rollout.formats.template import (
    MARK,
    THINK_CLOSING,
    THINK_OPENING,
    ChatTemplate,
    TemplateRefusal,
)
from treegraft.rollout.formats.turns import (
    TurnFormat,
    json_text,
    tool_schema,
)

RETRIEVE = ("<retrieve>", "</retrieve>")
# Results within a graft: the template's own marks may be whole turns, which would end the agent's.
SHOWN_RESULT = ("<result>", "</result>")
_DECODER = json.JSONDecoder()


class ChatFormat(TurnFormat):
    """Steps as turns of a conversation. A turn ends with an end token; `stop` ends one that goes on
    to write a result itself."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Sequence[Tool],
        *,
        template_options: Mapping[str, Any] | None = None,
        **options: Unpack[FormatOptions],
    ) -> None:
        """Takes the shared options and further variables of the template. Without `require_think`
        a thought may also be plain text before a call.

        Raises `SettingError` for a template that cannot be appended to, with the reason.
        """
        super().__init__(tokenizer, tools, template_options, **options)
        self._template = ChatTemplate(
            tokenizer,
            [tool_schema(tool) for tool in tools],
            end_ids=self._end_ids,
            system_prompt=self.system_prompt,
            options=template_options,
            require_think=self._require_think,
            thoughts=self._thoughts,
        )
        self.drops_thoughts = self._template.drops_thoughts
        dialect = self._dialect = self._template.dialect
        self._foreign_marks = (*RETRIEVE, *SHOWN_RESULT, *sorted(dialect.result_marks))
        """Marks that the agent must not write."""
        own = {THINK_OPENING, THINK_CLOSING, *MARK.findall(f"{dialect.opening} {dialect.closing}")}
        marks = {*dialect.marks, *self._foreign_marks, *own}
        # The marks of its own calls the agent may write, even where the tokenizer counts it among
        # its special tokens.
        self._set_marks(marks, own)
        self._template.schemas = self._described(self._template.schemas)
        self._graft_marks = (f"{RETRIEVE[0]}\n", f"\n{RETRIEVE[1]}\n")
        self.stop: tuple[str, ...] = tuple(mark for mark in self._foreign_marks if "/" not in mark)
        self.final: tuple[str, ...] = ()
        # At the end, since it renders and parses with everything above.
        self._check_reading(tools)

    def _check_reading(self, tools: Sequence[Tool]) -> None:
        """Raises TemplateRefusal where the format could not read its own steps back."""
        contents = [StepContent(thought="a", answer="b")]
        for tool in tools[:1]:
            call = ToolCall(tool.name, "a" if self._signatures[tool.name].text_parameter else "{}")
            calls = (call, call) if self._dialect.writes_several else (call,)
            thought = "a" if self._dialect.keeps_thoughts else ""
            contents.append(StepContent(thought=thought, calls=calls))
        for content in contents:
            try:
                self.render_step(content)
            except ValueError as error:
                reason = str(error).rstrip(".")
                raise TemplateRefusal(
                    f"the model's chat template writes what cannot be read back: {reason}",
                    code="template-not-read-back",
                ) from error

    def _written(self, messages: list[dict[str, Any]]) -> str:
        return self._template.prompt(messages)

    # Steps of the agent

    def parse_step(self, token_ids: Sequence[int]) -> ParsedStep:
        """Returns the content of one turn, a thought and calls or an answer, or which rule it
        broke.

        A turn that ran out of tokens before its end token breaks no rule; `is_complete` is False
        for it.
        """
        ids, has_ended = self._before_end(token_ids)
        text = (THINK_OPENING if self._dialect.opens_thought else "") + self._decode(ids)
        thought, body, is_closed = _split_thought(text)
        try:
            for mark in self._foreign_marks:
                if mark in text:
                    raise Violation(f"{mark} is not the agent's to write")
            # Special tokens other than calls' marks would open turns of other roles.
            if self._specials.count(ids):
                raise Violation("a special token inside the turn")
            if not has_ended:
                return ParsedStep(StepContent(thought=thought or ""), None)
            if not is_closed:
                raise Violation(f"a thought without {THINK_CLOSING}")
            if thought is None and self._require_think:
                raise Violation(f"no thought: the turn does not begin with {THINK_OPENING}")
            return ParsedStep(self._content(thought or "", body), None)
        except Violation as violation:
            return ParsedStep(StepContent(thought=thought or ""), str(violation))

    def _content(self, thought: str, body: str) -> StepContent:
        opening = self._dialect.opening
        if opening and opening in body:
            before, _, calls = body.partition(opening)
            if before.strip() and not self._dialect.keeps_thoughts:
                raise Violation("text before a tool call, which the template would drop")
            return StepContent(thought=self._joined(thought, before), calls=self._read_calls(calls))
        if not opening and self._signatures and _begins_with_call(body):
            return StepContent(thought=thought, calls=self._read_calls(body))
        if not body.strip():
            raise Violation("ended without a tool call or an answer")
        before, answer = self.split_answer(body)
        self._joined("", answer)  # refuses marks in the answer
        return StepContent(thought=self._joined(thought, before), answer=answer)

    def _joined(self, thought: str, text: str) -> str:
        """The thought with the other text before a call or an answer."""
        if THINK_OPENING in text:
            raise Violation("a second thought")
        # Without an opening mark the closing one may be a plain brace, which any text may hold.
        closing = self._dialect.closing if self._dialect.opening else ""
        for mark in filter(None, (THINK_CLOSING, closing)):
            if mark in text:
                raise Violation(f"{mark} out of place")
        return "\n".join(filter(None, (thought, text.strip())))

    def _read_calls(self, text: str) -> tuple[ToolCall, ...]:
        """The calls of a turn; `text` begins behind the first opening mark."""
        opening = self._dialect.opening
        closing = self._dialect.closing
        calls: list[ToolCall] = []
        while True:
            try:
                found, end = _DECODER.raw_decode(text.lstrip())
            except (ValueError, RecursionError):
                raise Violation("a tool call that is not JSON") from None
            rest = text.lstrip()[end:].lstrip()
            if not rest.startswith(closing):
                raise Violation(f"no {closing} behind a tool call's JSON")
            calls.append(self.read_call(found))
            rest = rest[len(closing) :].lstrip()
            if not rest:
                return tuple(calls)
            if not opening or not rest.startswith(opening):
                raise Violation("text after the tool call")
            if not self._dialect.writes_several:
                raise Violation("a second tool call in one turn")
            text = rest[len(opening) :]

    # Conversations of programs that write their own prompts

    def _said(self, token_ids: Sequence[int]) -> tuple[str, str]:
        opening = THINK_OPENING if self._dialect.opens_thought else ""
        thought, said, _ = _split_thought(opening + self.written_text(token_ids))
        if self.parse_step(token_ids).content.calls:
            said = said.partition(self._dialect.opening or said)[0].rstrip()
        return thought or "", said if thought is None else said.lstrip("\n")

    # Results, foreign steps, and steps as the agent would have written them

    def observation_ids(self, observations: Sequence[Observation]) -> tuple[int, ...]:
        """Returns the text that follows the agent's turn: the rest of that, the results as tokens,
        and the opening of its next turn.

        Never raises: a text that cannot be encoded is replaced.
        """
        texts = [one.text for one in observations]
        return tuple(
            self._harmless_ids(
                lambda safe: self._encode(self._template.results([*map(safe, texts)]))
            )
        )

    def context_spans(
        self, token_ids: Sequence[int], observations: Sequence[Observation]
    ) -> tuple[Span, ...]:
        """Returns the turn as the template shows it to later ones, without its thought, and what
        `observation_ids` gives."""
        ids, _ = self._before_end(token_ids)
        _, body, _ = _split_thought(self._decode(ids))
        # As said, not as parsed: `StepContent` has text before a call among its thoughts.
        said, _, _ = body.partition(self._dialect.opening or body)
        calls = []
        for call in self.parse_step(token_ids).content.calls:
            is_known = call.name in self._signatures
            calls.append(self._arguments(call) if is_known else (call.name, json.loads(call.body)))
        try:
            turn = self._encode(self._template.earlier_turn(said.strip(), calls))
        except ValueError:
            # What the template cannot write stays as it was.
            turn = [*token_ids]
        own: Span = (tuple(turn), Origin.CONTEXT)
        return own, (self.observation_ids(observations), Origin.TOOL)

    def _graft_ids(self, values: Sequence[str | StepContent]) -> list[int]:
        def render(safe: Callable[[str], str]) -> list[int]:
            return self._encode("\n".join(self._shown(value, safe) for value in values))

        return self._harmless_ids(render)

    def _shown(self, value: str | StepContent, safe: Callable[[str], str]) -> str:
        if isinstance(value, str):
            return safe(value)
        lines = [safe(value.thought.strip())] if value.thought.strip() else []
        for call in value.calls:
            try:
                name, arguments = self._arguments(call)
            except ValueError:
                # A tool that this agent has not: as text, in no mark that it could repeat.
                lines.append(safe(f"{call.name}: {call.body.strip()}"))
                continue
            inner = f'{{"name": "{name}", "arguments": {safe(json_text(arguments))}}}'
            lines += filter(None, (self._dialect.opening, inner, self._dialect.closing))
        lines += [
            f"{SHOWN_RESULT[0]}\n{safe(one.text)}\n{SHOWN_RESULT[1]}" for one in value.observations
        ]
        if value.answer is not None:
            lines.append(f"\\boxed{{{safe(normal_answer(value.answer))}}}")
        return "\n".join(lines)

    def _step_ids(self, content: StepContent) -> list[int]:
        thought = clean(content.thought, keep_controls=True).strip()
        if len(content.calls) > 1 and not self._dialect.writes_several:
            raise ValueError(f"the chat template knows one call a turn; got {len(content.calls)}.")
        answer = "" if content.answer is None else self._answer_text(content.answer)
        calls = [*map(self._arguments, content.calls)]
        return self._encode(self._template.turn(thought, calls, answer))


def _split_thought(text: str) -> tuple[str | None, str, bool]:
    """The text in think tags at the beginning (None: no tags), the text after it, and whether the
    thought is closed."""
    if not text.lstrip().startswith(THINK_OPENING):
        return None, text, True
    inner, closing, body = text.lstrip()[len(THINK_OPENING) :].partition(THINK_CLOSING)
    return inner.strip(), body, bool(closing)


def _begins_with_call(body: str) -> bool:
    """Whether a turn whose calls have no marks begins with one."""
    try:
        found, _ = _DECODER.raw_decode(body.lstrip())
    except (ValueError, RecursionError):
        return False
    return is_call(found)


def is_call(found: Any) -> bool:
    """Returns whether a JSON value has the shape of a tool call."""
    names = found.keys() if isinstance(found, dict) else ()
    return "name" in names and ("arguments" in names or "parameters" in names)
