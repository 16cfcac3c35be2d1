"""Parts of a format that do not depend on its marks: prompts within their limit, special tokens,
boxed answers, grafts between retrieve tags, the composed system prompt."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, TypedDict, Unpack

from treegraft.core.errors import DataError
from treegraft.core.interfaces import Span, Tokenizer, Tool, signature_of
from treegraft.core.types import Observation, Origin, ParsedStep, StepContent, Task
from treegraft.rollout.formats.answers import AnswerRule

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_PLAIN = str.maketrans(dict.fromkeys("<>[]|{}", " "))
WITHHELD = "withheld"
"""Replaces foreign text that a tokenizer turns into special tokens however it is written."""
_TEXT = re.compile(r"\\text\s*\{(.*)\}", re.DOTALL)


class Violation(Exception):
    """The step breaks a rule; the message says which."""


class Specials:
    """The special tokens of a tokenizer, as ids and as texts, apart from the tags of a format."""

    def __init__(
        self, tokenizer: Tokenizer, markup: Sequence[str], end_ids: Collection[int]
    ) -> None:
        """Args:
        markup: the format's own tags, which some tokenizers hold as single tokens.
        end_ids: tokens that end a completion; special whatever the tokenizer says.
        """
        ids = {*getattr(tokenizer, "all_special_ids", ()), *end_ids}
        added = getattr(tokenizer, "added_tokens_decoder", {})
        ids |= {index for index, token in added.items() if getattr(token, "special", False)}
        encoded = [tokenizer.encode(tag, add_special_tokens=False) for tag in markup]
        unknown = _natural_unknown(tokenizer)
        markup_ids = {tag_ids[0] for tag_ids in encoded if len(tag_ids) == 1} - {unknown}
        self.is_markup_special = bool(markup_ids & ids)
        """The tokenizer counts our tags among its special tokens."""
        self.ids = frozenset(ids - markup_ids - {unknown})
        """Tokens that no text may hold."""
        self.ids_with_markup = self.ids | markup_ids
        """The same with our tags: tokens that no foreign text may hold."""
        texts = {tokenizer.decode([index], skip_special_tokens=False) for index in ids - markup_ids}
        # The longest first, since of alternatives that begin alike a pattern finds the first.
        longest_first = filter(str.strip, sorted(texts, key=len, reverse=True))
        self._texts = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def broken(self, text: str) -> str:
        """Returns the text with a space after the first character of each special token's text.
        Idempotent."""
        return self._texts.sub(_broken, text)

    def count(self, ids: Sequence[int]) -> int:
        """Returns how many of the tokens are special."""
        return sum(token in self.ids for token in ids)


class FormatOptions(TypedDict, total=False):
    """The options that all formats share."""

    system_prompt: str | None
    """None, the default, composes one from the tools; "" sends none."""
    require_think: bool
    """A step without <think>...</think> is a violation; True by default."""
    require_boxed: bool
    """An answer without \\boxed{} is a violation; True by default."""
    answer: AnswerRule | None
    """How the answer is read; None, the default, means the last box, or all of it."""
    max_context: int | None
    """Longest prompt, in tokens; None, the default, for no limit."""
    end_ids: Sequence[int] | None
    """Every token that ends a completion; None, the default, means the tokenizer's end-of-sequence
    token."""
    mentions_retrieval: bool
    """The composed system prompt says that context may come in retrieve tags, as in runs with
    grafts; False by default."""
    thoughts: Literal["auto", "keep", "drop"]
    """Whether later steps see the thoughts of earlier ones; "auto", the default, as the chat
    template has it, and in tags they do."""


class MarkedFormat(ABC):
    """The part that tags and chat templates share: everything but how prompts and steps are
    written and read."""

    _specials: Specials
    _forged: re.Pattern[str]
    """Finds the marks that no foreign text may hold; see `loosely`."""
    _graft_marks: tuple[str, str]
    drops_thoughts: bool
    """Whether later steps see earlier ones without their thoughts."""
    notes: tuple[str, ...] = ()
    """Remarks for the user on how the format came about."""

    def __init__(
        self, tokenizer: Tokenizer, tools: Sequence[Tool], **options: Unpack[FormatOptions]
    ) -> None:
        self._tokenizer = tokenizer
        self._require_think = options.get("require_think", True)
        self._require_boxed = options.get("require_boxed", True)
        self._answer_rule = options.get("answer") or AnswerRule()
        self._max_context = options.get("max_context")
        end_ids = options.get("end_ids")
        given = [tokenizer.eos_token_id] if end_ids is None else end_ids
        self._end_ids = {index for index in given if index is not None}
        self._tools = tools
        self._given_prompt = options.get("system_prompt")
        self._mentions_retrieval = options.get("mentions_retrieval", False)
        self._thoughts = options.get("thoughts", "auto")
        self.drops_thoughts = self._thoughts == "drop"

    @cached_property
    def system_prompt(self) -> str:
        """The system prompt, composed if the settings have none."""
        if self._given_prompt is not None:
            return self._given_prompt
        return self._composed_prompt(self._tools, mentions_retrieval=self._mentions_retrieval)

    @abstractmethod
    def _composed_prompt(self, tools: Sequence[Tool], *, mentions_retrieval: bool) -> str: ...

    @abstractmethod
    def _asked_ids(self, task: Task) -> list[int]:
        """The tokens of the prompt."""

    @abstractmethod
    def _graft_ids(self, values: Sequence[str | StepContent]) -> list[int]:
        """The tokens of foreign steps, which can forge neither a mark nor an end token."""

    @abstractmethod
    def parse_step(self, token_ids: Sequence[int]) -> ParsedStep:
        """Returns the content of one step, or which rule it broke."""

    @abstractmethod
    def observation_ids(self, observations: Sequence[Observation]) -> tuple[int, ...]:
        """Returns the results as tokens that follow the agent's step."""

    def prompt_ids(self, task: Task) -> tuple[int, ...]:
        """Returns the tokens of the system prompt, the question or the messages that end with it,
        and the opening of the agent's turn.

        Raises `DataError` for a question that is too long or that still yields a special token, and
        for messages that the chat template refuses.
        """
        try:
            ids, harmless = (
                self._asked_ids(_with_texts(task, change))
                for change in (lambda text: self._specials.broken(clean(text)), lambda _: "?")
            )
        except Exception as error:  # a template is a program of the model's makers
            raise DataError(
                f"task '{task.id}': the chat template cannot write its prompt: {error}. Change the"
                " roles of its messages, or name another template with format.chat_template.",
                code="prompt-not-written",
            ) from error
        # The template writes special tokens of its own; one more than those is the question's.
        if self._specials.count(ids) > self._specials.count(harmless):
            raise DataError(
                f"task '{task.id}': its question turns into a special token of the tokenizer;"
                " rephrase it.",
                code="question-special-token",
            )
        if self._max_context is not None and len(ids) > self._max_context:
            raise DataError(
                f"task '{task.id}': its prompt has {len(ids)} tokens, the limit is"
                f" {self._max_context}; drop the task, shorten its question or"
                " format.system_prompt, or take a model with a longer context.",
                code="prompt-too-long",
            )
        return tuple(ids)

    def written_text(self, token_ids: Sequence[int]) -> str:
        """Returns the text of one step of the policy, without the end token."""
        return self._decode(self._before_end(token_ids)[0])

    def render_graft(
        self, values: Sequence[str | StepContent], max_tokens: int | None = None
    ) -> tuple[int, ...]:
        """Returns another agent's steps as tokens, between retrieve tags. Never raises.

        All texts are foreign: none can forge a mark, the end of the graft or an end token. A value
        of plain text is not marked further.

        Args:
            max_tokens: the steps are cut from the left to this length, tags included; None cuts
                nothing.
        """
        # The marks are encoded apart from the text, so that a cut never removes them.
        opening, closing = (self._encode(mark) for mark in self._graft_marks)
        ids = self._graft_ids(values)
        if max_tokens is not None:
            # From the left, since the end of a step leads to what follows.
            ids = ids[max(0, len(ids) + len(opening) + len(closing) - max_tokens) :]
        return (*opening, *ids, *closing)

    def sanitized(self, text: str) -> str:
        """Returns foreign text with control characters replaced and marks and special tokens
        broken by a space."""
        return self._forged.sub(_broken, self._specials.broken(clean(text)))

    def _described(self, value: Any) -> Any:
        """What a tool says of itself, a text or a schema, such that it yields no mark and no
        special token: a server may have written it."""
        return with_texts(value, self._free_of_marks)

    def _free_of_marks(self, value: str) -> str:
        # The second leaves less: a normaliser can make marks of other characters.
        for text in (self.sanitized(value), plain_text(value)):
            ids = self._encode(text)
            is_free = self._specials.ids_with_markup.isdisjoint(ids)
            if is_free and not self._forged.search(self._decode(ids)):
                return text
        return WITHHELD

    def _encode(self, text: str, **options: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False, **options))

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def _before_end(self, token_ids: Sequence[int]) -> tuple[list[int], bool]:
        """A completion without its end tokens, and whether it had any."""
        ids = list(token_ids)
        # All of them: some models write two end tokens in a row.
        while ids and ids[-1] in self._end_ids:
            ids.pop()
        return ids, len(ids) < len(token_ids)

    def _continued(self, ids: Sequence[int], text: str, more: str) -> tuple[int, ...]:
        """The tokens of `text`, with which the text of `ids` begins, and of `more` behind it: the
        present ones as far as they reach."""
        num = shortest_prefix(self._decode, ids, text)
        # A token may reach over the end of the text.
        while not text.startswith(self._decode(ids[:num])):
            num -= 1
        rest = text[len(self._decode(ids[:num])) :]
        return (*ids[:num], *self._encode(rest + more))

    def _spans(self, ids: Sequence[int], seen: Sequence[Observation]) -> tuple[Span, ...]:
        """A step's tokens, then those of its results."""
        own: Span = (tuple(ids), Origin.POLICY)
        return (own, (self.observation_ids(seen), Origin.TOOL)) if seen else (own,)

    def answer_of(self, content: StepContent, task: Task) -> str | None:
        """Returns the answer that is compared with the task's reference, by the rule of the format;
        None if the step has none."""
        if content.answer is None:
            return None
        answer = self._answer_rule.read(content.answer, task.reference)
        return None if answer is None else normal_answer(answer)

    def split_answer(self, body: str) -> tuple[str, str]:
        """Returns the text before the answer and the answer, in its last box if that is looked for.

        Raises Violation for an answer without the box that is required.
        """
        found = boxed(body)
        if found is None and self._require_boxed:
            raise Violation("an answer without \\boxed{}")
        if found is None and self._answer_rule.kind == "boxed":
            return body, ""
        if found is None or not self._answer_rule.looks_for_box:
            return "", normal_answer(body)
        return body.rpartition("\\boxed")[0], normal_answer(found)

    def _answer_text(self, answer: str) -> str:
        """An answer as the agent writes it. Raises ValueError for one that cannot be read back."""
        plain = normal_answer(clean(answer, keep_controls=True))
        in_box = f"\\boxed{{{plain}}}"
        if not self._answer_rule.looks_for_box:
            return plain
        if boxed(in_box) == plain:
            return in_box
        if not self._require_boxed and boxed(plain) is None:
            return plain
        raise ValueError(
            f"the answer {answer[:80]!r} cannot stand in \\boxed{{}}; its braces do not balance."
        )


def _with_texts(task: Task, change: Callable[[str], str]) -> Task:
    """The task with every text of its question and its messages changed."""

    def message(given: Mapping[str, Any]) -> dict[str, Any]:
        made = {**given, "content": with_texts(given["content"], change, keys=str)}
        if calls := given.get("tool_calls"):
            functions = [{**call["function"]} for call in calls]
            for function in functions:
                function["arguments"] = with_texts(function["arguments"], change, keys=str)
            made["tool_calls"] = [
                {**call, "function": function}
                for call, function in zip(calls, functions, strict=True)
            ]
        return made

    messages = tuple(map(message, task.messages))
    return replace(task, question=change(task.question), messages=messages)


def _broken(found: re.Match[str]) -> str:
    return f"{found[0][0]} {found[0][1:]}" if len(found[0]) > 1 else " "


def loosely(marks: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern that finds marks in any case and with white space inside, as a lenient
    reader might."""
    patterns = []
    for mark in sorted(marks, key=len, reverse=True):
        tag = re.fullmatch(r"</?([\w.-]+)>", mark)
        patterns.append(rf"<(?:/\s*)?{re.escape(tag[1])}\s*>" if tag else re.escape(mark))
    return re.compile("|".join(patterns), re.IGNORECASE)


def _natural_unknown(tokenizer: Tokenizer) -> int | None:
    """Returns the unknown token's id where ordinary text can yield it, as in a word-level
    vocabulary, else None."""
    unknown: int | None = getattr(tokenizer, "unk_token_id", None)
    ids = tokenizer.encode("\u2603\u2604", add_special_tokens=False, split_special_tokens=True)
    return unknown if unknown in ids and unknown != tokenizer.eos_token_id else None


def clean(text: str, *, keep_controls: bool = False) -> str:
    """Returns text that every tokenizer accepts: lone surrogates are replaced, and so are control
    characters.

    Line breaks and tabs stay; `keep_controls` leaves the other control characters too.
    """
    encodable = text.encode("utf-8", "replace").decode("utf-8")
    if keep_controls:
        return encodable
    return _CONTROLS.sub(" ", encodable.replace("\r\n", "\n").replace("\r", "\n"))


def with_texts(
    value: Any, change: Callable[[str], str], keys: Callable[[str], str] | None = None
) -> Any:
    """Returns a value with every text in it changed that is not empty.

    Args:
        keys: changes the keys of objects; None, the default, means as the texts.
    """
    if isinstance(value, str):
        return change(value) if value else value
    if isinstance(value, Mapping):
        return {(keys or change)(key): with_texts(one, change, keys) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [with_texts(one, change, keys) for one in value]
    return value


def plain_text(text: str) -> str:
    """Returns a text without anything that marks are made of."""
    return clean(text).encode("ascii", "replace").decode().translate(_PLAIN)


def boxed(text: str) -> str | None:
    """Returns the text in the last \\boxed{} whose braces balance (escaped braces do not count),
    or None."""
    openings: list[tuple[int, bool]] = []
    last: tuple[int, int] | None = None
    for found in _BRACES.finditer(text):
        mark = found[0]
        if mark == "}":
            if openings:
                start, is_box = openings.pop()
                if is_box and (last is None or start > last[0]):
                    last = (start, found.start())
        elif mark == "{" or mark.startswith("\\boxed"):
            openings.append((found.end(), mark != "{"))
    return None if last is None else text[last[0] : last[1]].strip()


def normal_answer(text: str) -> str:
    """Returns the answer without surrounding space and without a \\text{} around the whole of
    it."""
    answer = text.strip()
    while found := _TEXT.fullmatch(answer):
        inner = found[1].strip()
        # Of "\\text{a} + \\text{b}" the pattern takes "a} + \\text{b", whose braces do not balance.
        if boxed(f"\\boxed{{{found[1]}}}") != inner:
            break
        answer = inner
    return answer


def shortest_prefix(decode: Callable[[Sequence[int]], str], ids: Sequence[int], text: str) -> int:
    """Returns how many leading tokens give a text that begins with `text`, as the text of all
    tokens does."""
    # By halves: a long step would be decoded once for each of its tokens otherwise.
    return bisect_left(range(len(ids)), True, key=lambda num: decode(ids[:num]).startswith(text))


def _input_of(tool: Tool) -> str:
    """A sentence on the input of a tool with more than a text, or whose text is optional."""
    signature = signature_of(tool)
    properties = signature.schema.get("properties") or {}
    optional = [name for name in properties if not signature.requires(name)]
    if signature.text_parameter is not None:
        return " Its input may be empty." if optional else ""
    if not properties:
        return ""
    shown = f" Its input is a JSON object: {json.dumps(properties, ensure_ascii=False)}"
    return f"{shown}. Optional: {', '.join(optional)}." if optional else shown


def system_prompt_for(
    tools: Sequence[Tool],
    require_think: bool,
    require_boxed: bool,
    *,
    safe: Callable[[str], str] = str,
    mentions_retrieval: bool = False,
) -> str:
    """Returns a system prompt that explains the tags, from the tools that are on.

    Args:
        safe: makes what a tool says of itself harmless.
        mentions_retrieval: say that context may come in retrieve tags (RAPO, arXiv 2603.03078).
    """
    answer = "\\boxed{...}" if require_boxed else "..."
    if tools:
        lines = [
            f"{'Then either' if require_think else 'Either'} call one tool or give the answer.",
            "To call a tool, write its input between its tags and stop:",
            *(
                f"<{one.name}>...</{one.name}> {safe(f'{one.description}{_input_of(one)}')}"
                for one in tools
            ),
            "You will then be shown what it returned: <result>...</result>. Never write <result>"
            " yourself.",
            f"Once you know the answer, write it and stop: <answer>{answer}</answer>.",
        ]
    else:
        start = "Then write" if require_think else "Write"
        lines = [f"{start} the answer and stop: <answer>{answer}</answer>."]
    return framed_prompt(lines, require_think, require_boxed, mentions_retrieval=mentions_retrieval)


def framed_prompt(
    lines: Sequence[str], require_think: bool, require_boxed: bool, *, mentions_retrieval: bool
) -> str:
    """Returns a system prompt around the lines that say how to call tools and to answer."""
    whole = ["Answer the user's question."]
    if require_think:
        whole.append("Begin each turn with your reasoning: <think>...</think>.")
    whole += lines
    if require_boxed:
        whole.append("The braces hold the bare answer, nothing else.")
    if mentions_retrieval:
        whole.append(
            "Extra context, a step of another agent, may come in <retrieve>...</retrieve>; never"
            " write that yourself."
        )
    return "\n".join(whole)
