"""A tokenizer's chat template as a text that only grows, the agent's own turns apart where later
ones see them without their thoughts.

    prompt | the agent's turn, its end token | rest of that turn, results, opening of the next turn
    | the agent's turn ...

The agent's own tokens are never rendered again: the text between two of its turns is the difference
between two renderings around a fixed dummy turn. Whether that difference exists, and how calls and
results are written, is found out once, from conversations of probe words; a template without it is
refused with the reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from treegraft.core.errors import SettingError
from treegraft.core.interfaces import Tokenizer

THINK_OPENING = "<think>"
THINK_CLOSING = "</think>"
MARK = re.compile(r"</?[A-Za-z_][\w.-]*>|<[|\uff5c][^<>\s]+[|\uff5c]>|\[/?[A-Z][A-Z_]+\]")
"""The marks that templates put around turns, calls and results."""

# Probe words that no template writes by itself.
_TOOL = "zqtool"
_PARAMETER = "zqparameter"
_VALUE = "zqvalue"
_THOUGHT = "zqthought"
_RESULT = "zqresult"
_BEHIND_THOUGHT = "\n\n"
_DECODER = json.JSONDecoder()
Call = tuple[str, Mapping[str, Any]]
"""Name and arguments."""
_PROBE: Call = (_TOOL, {_PARAMETER: _VALUE})
Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How a template writes. Dialect(opening="<tool_call>", closing="</tool_call>",
    writes_several=True)"""

    opening: str = ""
    """Stands before a call's JSON; empty where that is the whole turn."""
    closing: str = ""
    """Stands behind it."""
    writes_several: bool = False
    """A turn may hold several calls."""
    keeps_thoughts: bool = True
    """Text before a call stays where it is."""
    tags_thoughts: bool = True
    """A thought is in think tags, elsewhere it is plain text."""
    opens_thought: bool = False
    """The opening of a turn opens a thought too."""
    marks: frozenset[str] = frozenset()
    """Everything that turns, calls and results are marked with."""
    result_marks: frozenset[str] = frozenset()
    """Those of results that no special token says; never the agent's to write."""


class TemplateRefusal(SettingError):
    """A chat template that the chat format cannot use."""

    def __init__(self, reason: str, *, code: str) -> None:
        """Args:
        reason: what is wrong, without advice.
        """
        super().__init__(
            f"format.kind is 'chat', but {reason}. Expected a template whose text only grows from"
            " turn to turn, and which has places for calls and results. Name another one with"
            " format.chat_template, or set format.kind = 'tags'.",
            code=code,
        )
        self.reason = reason


class ChatTemplate:
    """Renders prompts, turns and results."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        schemas: Sequence[Mapping[str, Any]],
        *,
        end_ids: Collection[int],
        system_prompt: str = "",
        options: Mapping[str, Any] | None = None,
        require_think: bool = True,
        thoughts: Literal["auto", "keep", "drop"] = "auto",
    ) -> None:
        """Args: schemas: of the tools, in the shape of OpenAI's chat completions. end_ids: tokens
        that end a completion; one of them has to end the agent's turn. system_prompt: "" sends
        none. options: further variables of the template, such as enable_thinking. require_think:
        thoughts stand in tags even where the template itself knows none, and must have a place.
        thoughts: whether later turns see those of earlier ones; "auto" as the template has it.

        Raises `SettingError` for a template that cannot be appended to, or that has no place for
        thoughts, calls or results.
        """
        self._tokenizer = tokenizer
        self.schemas = [dict(schema) for schema in schemas]
        self._options = dict(options or {})
        self._system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._require_think = require_think
        self._thoughts = thoughts
        self.drops_thoughts = thoughts == "drop"
        """Whether later turns see earlier ones without their thoughts."""
        self._ends = [tokenizer.decode([index], skip_special_tokens=False) for index in end_ids]
        if not tokenizer.chat_template:
            raise TemplateRefusal(
                "the model's tokenizer has no chat template", code="template-missing"
            )
        source = str(tokenizer.chat_template)
        self.dialect = Dialect(tags_thoughts=require_think or THINK_CLOSING in source)
        self._dummy: Message = {}
        self._left = ""
        """What a dropped thought leaves behind."""
        self._rest = ""
        try:
            self._learn()
        except TemplateRefusal:
            raise
        except ValueError as error:
            kind = "a conversation with tool calls" if self.schemas else "a conversation"
            raise _refusal(f"it refuses {kind}: {error}") from error

    # Rendering

    def prompt(self, messages: list[Message]) -> str:
        """Returns the tools, the messages that end with the question, and the opening of the
        agent's turn."""
        return self._render(messages, opens=True)

    def turn(self, thought: str, calls: Sequence[Call] = (), answer: str = "") -> str:
        """Returns the agent's turn as the template writes it, its end token included.

        Raises:
            ValueError: the template cannot write it.
        """
        start = self._start("?")
        prompt = self._asked(start, opens=True)
        whole = self._asked([*start, self._agent(thought, calls, answer)])
        if not whole.startswith(prompt):
            raise ValueError("the template does not write this turn behind its prompt")
        turn = whole[len(prompt) :]
        end = self._end_of(turn)
        if end is None:
            raise ValueError("the template ends this turn with no end token")
        return turn[:end]

    def earlier_turn(self, said: str, calls: Sequence[Call]) -> str:
        """Returns the agent's turn as later ones see it where thoughts are dropped, its end token
        included.

        Args:
            said: its text before the calls, the thought left out.

        Raises:
            ValueError: the template cannot write it.
        """
        start = self._start("?")
        message = _message(self._left + said, calls)
        return self._up_to([*start, message])[len(self._asked(start, opens=True)) :]

    def results(self, texts: Sequence[str]) -> str:
        """Returns the text between the agent's end token and its next turn: the results, and
        that turn's opening."""
        start = [*self._start("?"), self._dummy]
        # Rendered anew each time: a template may write the date, which changes at midnight.
        before = self._up_to(start)
        return self._rest + self._render([*start, *map(_result, texts)], opens=True)[len(before) :]

    def _start(self, question: str) -> list[Message]:
        return [*self._system, {"role": "user", "content": question}]

    def _agent(self, thought: str, calls: Sequence[Call], answer: str = "") -> Message:
        if not self.dialect.tags_thoughts:
            said = f"{thought}\n\n" if thought and answer else thought
        elif thought or self._require_think:
            said = f"{THINK_OPENING}\n{thought}\n{THINK_CLOSING}{_BEHIND_THOUGHT}"
        else:
            said = ""
        return _message(said + answer, calls)

    def _render(self, messages: list[Message], *, opens: bool = False) -> str:
        # None, not []: some templates write a heading for an empty list of tools.
        tools = self.schemas or None
        return str(
            self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=opens, **self._options
            )
        )

    def _asked(self, messages: list[Message], *, opens: bool = False) -> str:
        """The rendering; raises ValueError with the reason of a template that refuses, whatever it
        raises."""
        try:
            return self._render(messages, opens=opens)
        except Exception as error:  # a template is a program of the model's makers
            raise ValueError(str(error).strip() or type(error).__name__) from error

    def _end_of(self, turn: str) -> int | None:
        """Where the last end token of a turn ends; None where there is none."""
        ends = [turn.rfind(text) + len(text) for text in self._ends if text in turn]
        return max(ends, default=None)

    def _up_to(self, path: list[Message]) -> str:
        """The text up to the end of the last turn, as it stands once results follow."""
        # A turn that is the last one has its thought, or the mark of an empty one.
        if not self.drops_thoughts:
            return self._asked(path)
        whole = self._asked([*path, _result(_RESULT)], opens=True)
        end = self._end_of(whole[: whole.rfind(_RESULT)])
        if end is None:
            raise ValueError("the template ends this turn with no end token")
        return whole[:end]

    # Finding out

    def _learn(self) -> None:
        prompt = self._asked(self._start("?"), opens=True)
        if prompt.rstrip().endswith(THINK_OPENING):
            self.dialect = replace(self.dialect, opens_thought=True, tags_thoughts=True)
        path = self._start("?")
        if self.schemas:
            self._learn_thoughts(path)
            self._learn_calls(path, prompt)
            path = self._learn_results(path)
        self._check_answer(path)

    def _learn_thoughts(self, start: list[Message]) -> None:
        """Fixes the dummy turn: with a thought, unless the template has no place for one."""
        prompt = self._asked(start, opens=True)
        for schema in self.schemas:
            name = schema["function"]["name"]
            if name not in prompt:
                raise _refusal(
                    f"it does not show the agent its tools ('{name}' is not in the prompt)"
                )
        self._dummy = self._agent(_THOUGHT, [_PROBE])
        last = self._asked([*start, self._dummy])
        earlier = self._asked([*start, self._dummy, _result(_RESULT)], opens=True)
        if _THOUGHT in last and _THOUGHT not in earlier:
            if self._thoughts == "keep":
                raise _refusal(
                    "it drops the thoughts of earlier turns, and format.thoughts is 'keep'; set it"
                    " to 'drop'"
                )
            self.drops_thoughts = True
        if _THOUGHT in last:
            self._learn_drop(start, prompt, earlier)
            return
        if self._require_think:
            raise _refusal(
                "it drops text before a tool call, and format.require_think asks for a"
                " thought there; set it to false"
            )
        self.dialect = replace(self.dialect, keeps_thoughts=False)
        self._dummy = self._agent("", [_PROBE])

    def _learn_drop(self, start: list[Message], prompt: str, earlier: str) -> None:
        """Takes a dummy turn without a thought where later turns see none."""
        if not self.drops_thoughts:
            return
        # Some leave the white space that stood behind the thought.
        for left in ("", _BEHIND_THOUGHT):
            self._dummy = _message(left, [_PROBE])
            self._left = left
            dropped = self._asked([*start, self._dummy, _result(_RESULT)], opens=True)
            if dropped == earlier or _THOUGHT in earlier:
                break
        else:
            raise _refusal(
                "it writes an earlier turn otherwise if it had a thought than if it had none"
            )
        if not dropped.startswith(prompt):
            raise _refusal(
                "it drops the thoughts of earlier turns and opens a thought before each turn, so"
                " that earlier turns do not continue the prompt they were written behind"
            )

    def _learn_calls(self, start: list[Message], prompt: str) -> None:
        """Reads off how a call is written."""
        whole = self._asked([*start, self._dummy])
        if not whole.startswith(prompt):
            raise _refusal(
                "the agent's turn does not continue the prompt, so tokens could not be appended"
            )
        turn = whole[len(prompt) :]
        if _TOOL not in turn:
            raise _refusal("it leaves out the agent's tool calls")
        place = _find_call(turn)
        if place is None:
            raise _refusal(
                'it does not write calls as JSON such as {"name": ..., "arguments": {...}}'
            )
        end = self._end_of(turn)
        if end is None or end < place[1]:
            raise _refusal(
                f"it ends the agent's turn with {turn[place[1] :].strip()!r}, which holds none of"
                f" the tokens that end a completion ({', '.join(map(repr, self._ends))}); set the"
                " tokenizer's eos_token"
            )
        # White space or a mark behind the end token, which is never sampled.
        self._rest = "" if self.drops_thoughts else turn[end:]
        closing = turn[place[1] : end]
        for text in self._ends:
            closing = closing.replace(text, "")
        before = turn[: place[0]].rpartition(THINK_CLOSING)[2].replace(_THOUGHT, "")
        self.dialect = replace(
            self.dialect,
            opening=before.strip(),
            closing=closing.strip(),
            writes_several=bool(before.strip()) and self._writes_two(start),
            marks=frozenset(MARK.findall(turn)),
        )

    def _writes_two(self, start: list[Message]) -> bool:
        second = f"{_TOOL}2"
        # Of another name, since equal calls could be merged.
        dummy = {**self._dummy, "tool_calls": [_call(0, *_PROBE), _call(1, second, {})]}
        try:
            return f'"{second}"' in self._asked([*start, dummy])
        except ValueError:
            return False  # some refuse several calls, others leave out all but the first

    def _learn_results(self, start: list[Message]) -> list[Message]:
        """Checks that results are appended, the same way each time; returns the conversation so
        far."""
        path = [*start, self._dummy]
        before = self._up_to(path)
        after = self._asked([*path, _result(_RESULT)], opens=True)
        if _RESULT not in after:
            raise _refusal("it has no place for a tool's result (a message of the role 'tool')")
        if not after.startswith(before):
            raise _refusal(
                "it writes earlier turns differently once a tool's result follows, so tokens could"
                " not be appended"
            )
        shown = after[len(before) :]
        self._check_neutral(path, shown)
        head, *_, tail = shown.split(_RESULT)
        if not MARK.search(head) or not MARK.search(tail):
            raise _refusal(
                "plain text alone marks a tool's result, so a result could pass for the agent or"
                " the user"
            )
        path += [_result(_RESULT), self._dummy]
        # White space may differ: some templates close the last result otherwise than earlier ones.
        first = _squeezed(after)
        second = _squeezed(self._up_to(path))
        again = _squeezed(self._asked([*path, _result(_RESULT)], opens=True))
        if not second.startswith(first) or not again.startswith(second):
            raise _refusal(
                "it writes earlier results or turns differently once further ones follow"
            )
        if again[len(second) :] != _squeezed(shown):
            raise _refusal("it writes a second result otherwise than the first")
        marks = frozenset(MARK.findall(self._rest + shown))
        special = {*getattr(self._tokenizer, "all_special_tokens", ()), *self._ends}
        own = {THINK_OPENING, THINK_CLOSING, self.dialect.opening, self.dialect.closing}
        self.dialect = replace(
            self.dialect, marks=self.dialect.marks | marks, result_marks=marks - special - own
        )
        return path[:-1]

    def _check_neutral(self, path: list[Message], shown: str) -> None:
        """Results must not name the call or the tool that they belong to: the dummy's would stand
        there."""
        for key, value in (("name", "zqother"), ("tool_call_id", "call00077")):
            other = self._asked([*path, {**_result(_RESULT), key: value}], opens=True)
            if other[len(self._up_to(path)) :] != shown:
                raise _refusal(
                    f"it writes the {key} of each call beside its result, which has to be known"
                    " before the call is made"
                )

    def _check_answer(self, path: list[Message]) -> None:
        """Checks that the answer is appended; the format reads it back besides."""
        prompt = self._asked(path, opens=True)
        whole = self._asked([*path, self._agent(_THOUGHT, (), "zqanswer")])
        if not _squeezed(whole).startswith(_squeezed(prompt)):
            raise _refusal("it writes earlier turns differently once the answer follows")


def _message(said: str, calls: Sequence[Call]) -> Message:
    message: Message = {"role": "assistant", "content": said}
    if calls:
        message["tool_calls"] = [_call(number, *call) for number, call in enumerate(calls)]
    return message


def _call(number: int, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "function",
        "id": f"call{number:05}",
        "function": {"name": name, "arguments": dict(arguments)},
    }


def _result(text: str) -> Message:
    return {"role": "tool", "name": _TOOL, "tool_call_id": "call00000", "content": text}


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _find_call(turn: str) -> tuple[int, int] | None:
    """Where the probe call's JSON begins and ends; None where there is none."""
    for found in re.finditer(r"\{", turn):
        try:
            value, end = _DECODER.raw_decode(turn, found.start())
        except ValueError:
            continue
        is_call = isinstance(value, dict) and value.get("name") == _TOOL
        if is_call and arguments_of(value) == {_PARAMETER: _VALUE}:
            return found.start(), end
    return None


def arguments_of(call: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the arguments of a call's JSON, whichever of the usual names they have; None where
    they are no object."""
    value = call.get("arguments", call.get("parameters", {}))
    # OpenAI's own shape: the arguments are JSON within a string.
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


def _refusal(reason: str) -> TemplateRefusal:
    return TemplateRefusal(
        f"the model's chat template cannot be used, since {reason}", code="template-invalid"
    )
