"""The papers' format: think, one tag per tool, result, answer with \\boxed{}.

    <think> ... </think> <search> ... </search>         one step: a thought and one call, or
    <think> ... </think> <answer>\\boxed{...}</answer>  the answer, then end-of-sequence
    <result> ... </result>                              an observation; never written by the agent
    <retrieve> ... </retrieve>                          another agent's steps in the same tags

Parsing takes one step at a time, the agent's own tokens only; text from elsewhere is encoded so
that it holds no tag of ours and no special token.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from treegraft.core.errors import SettingError
from treegraft.core.interfaces import Span, Tokenizer, Tool
from treegraft.core.types import (
    SYSTEM_ROLES,
    Observation,
    Origin,
    ParsedStep,
    StepContent,
    Task,
    ToolCall,
)
from treegraft.rollout.formats.markup import (
    FormatOptions,
    MarkedFormat,
    Specials,
    Violation,
    boxed,
    clean,
    loosely,
    normal_answer,
    shortest_prefix,
    system_prompt_for,
)

THINK = "think"
RESULT = "result"
RETRIEVE = "retrieve"
ANSWER = "answer"
NOT_THE_AGENTS = (RESULT, RETRIEVE)
"""Tags that the agent must not write."""
_ANY_OPENING = re.compile(r"<([a-z_]+)>")
_ANY_CLOSING = re.compile(r"</([a-z_]+)>")
_INFORMATION = "information"
"""Search-R1's tag for a result."""
_NEXT_RESULT = {
    name: re.compile(rf"\s*<{name}>(.*?)</{name}>", re.DOTALL) for name in (RESULT, _INFORMATION)
}
_BEFORE_RESULT = re.compile(rf"</[a-z_]+>\s{{0,99}}<{RESULT}>")
_EXPECTED = f"a call in a tag of its own and its result in <{RESULT}> or <{_INFORMATION}>"


@dataclass(slots=True)
class _Reading:
    """The part of a step that has been read."""

    thought: str | None = None
    name: str | None = None
    """The tag of its action, once that is closed."""
    body: str = ""
    end: int = 0
    """Where the closing tag of its action ends."""


class TagsFormat(MarkedFormat):
    """Steps as tags. `stop` has the closing tags of the tools, `final` that of the answer."""

    def __init__(
        self, tokenizer: Tokenizer, tools: Sequence[Tool], **options: Unpack[FormatOptions]
    ) -> None:
        """Raises `SettingError` for a tool whose name is no tag or one of the format's own."""
        for tool in tools:
            is_own = tool.name in (THINK, ANSWER, *NOT_THE_AGENTS)
            if is_own or not re.fullmatch(r"[a-z_]+", tool.name):
                raise SettingError(
                    f"tool '{tool.name}' cannot be a tag; a name consists of lower-case letters and"
                    f" underscores and is none of '{THINK}', '{ANSWER}', '{RESULT}', '{RETRIEVE}'.",
                    code="tool-name-no-tag",
                )
        super().__init__(tokenizer, tools, **options)
        self._tool_names = tuple(tool.name for tool in tools)
        self._names = (THINK, *self._tool_names, *NOT_THE_AGENTS, ANSWER)
        self._tag = re.compile(rf"<(/?)({'|'.join(self._names)})>")
        markup = [f"<{slash}{name}>" for name in self._names for slash in ("", "/")]
        self._forged = loosely(markup)
        self._specials = Specials(tokenizer, markup, self._end_ids)
        self._graft_marks = (f"\n<{RETRIEVE}>\n", f"\n</{RETRIEVE}>\n")
        self.stop: tuple[str, ...] = tuple(f"</{name}>" for name in self._tool_names)
        self.final: tuple[str, ...] = (f"</{ANSWER}>",)

    def _composed_prompt(self, tools: Sequence[Tool], *, mentions_retrieval: bool) -> str:
        return system_prompt_for(
            tools,
            self._require_think,
            self._require_boxed,
            safe=self._described,
            mentions_retrieval=mentions_retrieval,
        )

    def _asked_ids(self, task: Task) -> list[int]:
        messages = task.conversation(self.system_prompt)
        if not self._tokenizer.chat_template:
            return self._encode(_labelled(messages))
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return self._encode(str(text))

    # Steps of the agent

    def parse_step(self, token_ids: Sequence[int]) -> ParsedStep:
        """Returns the content of one step, a thought and a call or an answer, or which rule it
        broke.

        A step that ran out of tokens breaks no rule; `is_complete` is False for it.
        """
        ids, has_ended = self._before_end(token_ids)
        text = self._decode(ids)

        def ends_at(end: int) -> bool:
            # What follows the tag inside the token that closes it does not matter.
            return shortest_prefix(self._decode, ids, text[:end]) == len(ids)

        has_special = self._specials.count(ids) > 0
        return self._parsed(text, ends_at, has_special=has_special, has_ended=has_ended)

    def _parsed(
        self, text: str, ends_at: Callable[[int], bool], *, has_special: bool, has_ended: bool
    ) -> ParsedStep:
        reading = _Reading()
        try:
            self._read(text, reading)
            if reading.name is not None and not ends_at(reading.end):
                action = "answer" if reading.name == ANSWER else "tool call"
                raise Violation(f"text after the {action}")
            if has_special:
                raise Violation("a special token inside the step")
            if reading.name is None and has_ended:
                raise Violation("ended without a tool call or an answer")
            return ParsedStep(self._said(reading), None)
        except Violation as violation:
            return ParsedStep(StepContent(thought=reading.thought or ""), str(violation))

    def _said(self, reading: _Reading) -> StepContent:
        thought = reading.thought or ""
        if reading.name is None:
            return StepContent(thought=thought)
        if reading.name == ANSWER:
            return StepContent(thought=thought, answer=self.split_answer(reading.body)[1])
        return StepContent(thought=thought, calls=(ToolCall(reading.name, reading.body.strip()),))

    def parse_text(self, text: str) -> ParsedStep:
        """Returns the content of a step that comes as text, from a server, by the rules of
        `parse_step`."""
        for token in self._end_ids:
            text = text.rstrip().removesuffix(self._decode([token]))
        # Not by tokens: those of this policy may lack words of another agent's.
        return self._parsed(
            text,
            lambda end: not text[end:].strip(),
            has_special=self._specials.broken(text) != text,
            has_ended=False,
        )

    def _read(self, text: str, reading: _Reading) -> None:
        """Fills in `reading` up to the end of the step's action; leaves its name None where the
        text ends before."""
        position = 0
        while reading.name is None:
            opening = self._tag.search(text, position)
            outside = text[position : opening.start() if opening else len(text)].strip()
            # A step that ran out of tokens may end inside an opening tag.
            may_become_tag = opening is None and any(
                f"<{name}>".startswith(outside) for name in self._names
            )
            if outside and not may_become_tag:
                raise Violation("text outside tags")
            if opening is None:
                return
            name = opening[2]
            if name in NOT_THE_AGENTS:
                raise Violation(f"{opening[0]} is not the agent's to write")
            if opening[1]:
                raise Violation(f"{opening[0]} without <{name}>")
            if name == THINK and reading.thought is not None:
                raise Violation("a second thought")
            if name != THINK and self._require_think and reading.thought is None:
                raise Violation(f"no thought before <{name}>")
            # Any of our tags: one inside another is a violation, not text.
            closing = self._tag.search(text, opening.end())
            if closing is None:
                return
            if closing[2] in NOT_THE_AGENTS:
                raise Violation(f"{closing[0]} is not the agent's to write")
            if closing[0] != f"</{name}>":
                raise Violation(f"{closing[0]} inside <{name}>")
            body = text[opening.end() : closing.start()]
            position = closing.end()
            if name == THINK:
                reading.thought = body.strip()
            else:
                reading.name = name
                reading.body = body
                reading.end = position

    def call_opening(self, token_ids: Sequence[int], tool: str | None) -> tuple[int, ...]:
        """Returns the step up to its call or answer, and the opening tag of a tool: of `tool`, or
        of the one that it called, or else of the first."""
        ids, kept, action = self._up_to_action(token_ids)
        called = action if action in self._tool_names else self._tool_names[0]
        return self._continued(ids, kept, f"<{tool or called}>")

    def answer_opening(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Returns the step up to its call or answer, and the opening tag of an answer."""
        ids, kept, _ = self._up_to_action(token_ids)
        return self._continued(ids, kept, f"<{ANSWER}>")

    def _up_to_action(self, token_ids: Sequence[int]) -> tuple[Sequence[int], str, str]:
        """A step's tokens, its text up to its call or answer, and the name of that; no text and no
        name where it has neither."""
        ids, _ = self._before_end(token_ids)
        text = self._decode(ids)
        tags = (tag for tag in self._tag.finditer(text) if not tag[1] and tag[2] != THINK)
        action = next(tags, None)
        return (ids, text[: action.start()], action[2]) if action else (ids, "", "")

    # Results, foreign steps, and steps as the agent would have written them

    def observation_ids(self, observations: Sequence[Observation]) -> tuple[int, ...]:
        """Returns the results as tokens, each between result tags. Never raises: a text that cannot
        be encoded is replaced."""
        ids: list[int] = []
        for observation in observations:
            ids += self._encode(f"\n<{RESULT}>\n")
            ids += self._foreign_ids(observation.text)
            ids += self._encode(f"\n</{RESULT}>\n")
        return tuple(ids)

    def context_spans(
        self, token_ids: Sequence[int], observations: Sequence[Observation]
    ) -> tuple[Span, ...]:
        """Returns the step's call without its thought, and its results."""
        ids, kept, _ = self._up_to_action(token_ids)
        call = self._decode(ids)[len(kept) :]
        split = not self._specials.is_markup_special
        own: Span = (tuple(self._encode(call, split_special_tokens=split)), Origin.CONTEXT)
        return own, (self.observation_ids(observations), Origin.TOOL)

    def _graft_ids(self, values: Sequence[str | StepContent]) -> list[int]:
        ids: list[int] = []
        for number, value in enumerate(values):
            ids += self._encode("\n") if number else []
            ids += self._foreign_ids(value) if isinstance(value, str) else self._shown_ids(value)
        return ids

    def _shown_ids(self, content: StepContent) -> list[int]:
        ids: list[int] = []
        if content.thought.strip():
            ids += [*self._tagged_ids(THINK, content.thought), *self._encode("\n")]
        for call in content.calls:
            if call.name in self._tool_names:
                ids += self._tagged_ids(call.name, call.body)
            else:
                # A tool that this agent has not: as text, in no tag that it could repeat.
                ids += self._foreign_ids(f"{call.name}: {call.body.strip()}")
        ids += self.observation_ids(content.observations)
        if content.answer is not None:
            ids += self._encode(f"<{ANSWER}>\\boxed{{")
            ids += self._foreign_ids(normal_answer(content.answer))
            ids += self._encode(f"}}</{ANSWER}>")
        return ids

    def _tagged_ids(self, name: str, text: str) -> list[int]:
        return [
            *self._encode(f"<{name}>\n"),
            *self._foreign_ids(text.strip()),
            *self._encode(f"\n</{name}>"),
        ]

    def _foreign_ids(self, text: str) -> list[int]:
        safe = self.sanitized(text)
        special = self._specials.ids_with_markup
        # Each attempt leaves less of the text: a normaliser can make a mark of other characters,
        # such as full-width brackets.
        attempts = (
            safe,
            self.sanitized(safe.encode("ascii", "replace").decode()),
            safe.translate({ord("<"): " ", ord(">"): " "}),
        )
        ids: list[int] = []
        for attempt in attempts:
            ids = self._encode(attempt, split_special_tokens=True) if attempt else []
            if special.isdisjoint(ids) and not self._tag.search(self._decode(ids)):
                return ids
        return [token for token in ids if token not in special]

    def render_step(self, content: StepContent) -> tuple[Span, ...]:
        """Returns the step's policy tokens, an end-of-sequence token after an answer, then its
        results as tool tokens.

        Raises `ValueError` for a content that this format cannot say: tags or special tokens in its
        texts, several calls, a call and an answer at once or neither, an unknown tool, an answer
        whose braces do not balance.
        """
        text = self._step_text(content)
        # Split, so that no text becomes a special token; but where our tags are special tokens of
        # the tokenizer, that would tear them apart.
        split = not self._specials.is_markup_special
        ids = self._encode(text, split_special_tokens=split)
        parsed = self.parse_step(ids)
        if parsed.violation is not None or not parsed.is_complete or self._specials.count(ids):
            reason = parsed.violation or "it holds a special token or no whole action"
            raise ValueError(f"step {text[:80]!r}: it cannot be written in tags: {reason}.")
        if content.answer is not None and self._tokenizer.eos_token_id is not None:
            # So that a model which imitates the step learns to stop.
            ids.append(self._tokenizer.eos_token_id)
        return self._spans(ids, content.observations)

    def _step_text(self, content: StepContent) -> str:
        texts = [content.thought, content.answer or "", *(call.body for call in content.calls)]
        for text in texts:
            if found := self._tag.search(text):
                raise ValueError(
                    f"the text {text[:80]!r} holds the reserved tag {found[0]}; no step can say"
                    " that."
                )
        thought = clean(content.thought, keep_controls=True).strip()
        parts = [f"<{THINK}>\n{thought}\n</{THINK}>"] if thought or self._require_think else []
        if content.answer is not None and not content.calls:
            parts.append(f"<{ANSWER}>{self._answer_text(content.answer)}</{ANSWER}>")
        elif content.answer is None and len(content.calls) == 1:
            call = content.calls[0]
            if call.name not in self._tool_names:
                known = ", ".join(self._tool_names) or "none"
                raise ValueError(
                    f"there is no tool '{call.name}' in this format; it knows {known}."
                )
            parts.append(
                f"<{call.name}>\n{clean(call.body, keep_controls=True).strip()}\n</{call.name}>"
            )
        else:
            answers = "no answer" if content.answer is None else "an answer"
            raise ValueError(
                f"a step has one call or an answer; got {len(content.calls)} calls and {answers}."
            )
        return "\n".join(parts)


def _labelled(messages: Sequence[Mapping[str, Any]]) -> str:
    """A conversation without a chat template: the system prompt and a lone question as they are,
    the turns of a longer one behind the names of their roles."""
    turns = [one for one in messages if one["role"] not in SYSTEM_ROLES]
    parts = [one["content"] for one in messages if one["role"] in SYSTEM_ROLES]
    if len(turns) == 1:
        return "\n\n".join([*parts, turns[0]["content"]])
    for turn in turns:
        lines = [turn["content"]] if turn["content"] else []
        for call in turn.get("tool_calls", ()):
            function = call["function"]
            lines.append(f"{function['name']} {json.dumps(function['arguments'])}")
        parts.append(f"{turn['role'].capitalize()}: " + "\n".join(lines))
    return "\n\n".join([*parts, "Assistant:"])


def read_trajectory(text: str) -> tuple[StepContent, ...]:
    """Returns the steps of a trajectory that another agent wrote in tags like ours, up to its
    answer or its last result.

    More lenient than the format itself, since nothing is scored here: any paired tag that results
    follow is a tool call, text outside tags belongs to the thought, an answer needs no box, and
    text in retrieve tags was not that agent's. In a text without result tags, results are those in
    Search-R1's information tags.

    Raises:
        ValueError: neither a call with its result nor an answer, or a call and its result in tags
            that are not known.
    """
    steps: list[StepContent] = []
    thought: list[str] = []
    position = 0
    # Both looked up once: hostile text has many openings that are never closed.
    closings: dict[str, list[int]] = {}
    for closing in _ANY_CLOSING.finditer(text):
        closings.setdefault(closing[1], []).append(closing.start())
    shown_in = RESULT if RESULT in closings else _INFORMATION
    last = max(closings.get(shown_in, ()), default=-1)
    for opening in _ANY_OPENING.finditer(text):
        name = opening[1]
        ends = closings.get(name, [])
        index = bisect_left(ends, opening.end())
        if opening.start() < position or index == len(ends):
            continue
        end = ends[index]
        after = end + len(name) + 3
        is_call = name not in (THINK, ANSWER, RETRIEVE, shown_in)
        shown = list(_results_at(text, after, last, shown_in)) if is_call else []
        if is_call and not shown:
            _refuse_unknown_result(text, after, name, closings)
            continue
        before = text[position : opening.start()]
        body = text[opening.end() : end].strip()
        position = shown[-1].end() if shown else after
        thought += [before, body] if name == THINK else [before]
        if name in (THINK, RETRIEVE, shown_in):
            continue
        said = "\n".join(filter(None, map(str.strip, thought)))
        if "<|begin_" in said:
            raise ValueError(f"a call or a result as <|begin_...|>, expected {_EXPECTED}")
        thought = []
        if name == ANSWER:
            found = boxed(body)
            return (
                *steps,
                StepContent(thought=said, answer=normal_answer(body if found is None else found)),
            )
        results = tuple(Observation(text=result[1].strip()) for result in shown)
        steps.append(StepContent(thought=said, calls=(ToolCall(name, body),), observations=results))
    if not steps:
        raise ValueError("neither a tool call with its result nor an answer in tags")
    return tuple(steps)


def _refuse_unknown_result(
    text: str, position: int, name: str, closings: Mapping[str, Sequence[int]]
) -> None:
    """Raises ValueError for a pair of tags with another one behind it that may be its result, in
    tags that are not known: as a thought it would hold the words of a tool."""
    follows = _ANY_OPENING.match(text[position : position + 100].lstrip())
    if follows is None or follows[1] in (name, THINK, ANSWER, *NOT_THE_AGENTS):
        return
    ends = closings.get(follows[1], ())
    index = bisect_left(ends, position)
    # One with a result of its own is a call.
    if index < len(ends) and not _BEFORE_RESULT.match(text, ends[index]):
        raise ValueError(f"<{follows[1]}> behind <{name}>, expected {_EXPECTED}")


def _results_at(
    text: str, position: int, last: int, shown_in: str = RESULT
) -> Iterator[re.Match[str]]:
    """The result blocks that follow each other from `position` on, white space between them; none
    begins after `last`."""
    while position < last and (found := _NEXT_RESULT[shown_in].match(text, position)):
        yield found
        position = found.end()
