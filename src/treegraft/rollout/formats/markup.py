"""Parts shared by all formats: special tokens, boxed answers, harmless text, the system prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from treegraft.core.interfaces import Tokenizer, Tool, signature_of
from treegraft.core.types import StepContent

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_TEXT = re.compile(r"\\text\s*\{(.*)\}", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ParsedStep:
    """ParsedStep(StepContent(thought="look it up", calls=(ToolCall("search", "r1 of e2"),)),
    violation=None)"""

    content: StepContent
    """What the step says; after a violation no more than its thought."""
    violation: str | None
    """Which rule the step broke; None where it broke none."""

    @property
    def is_complete(self) -> bool:
        """Whether the step holds a whole call or answer; False for one that ran out of tokens, or
        broke a rule."""
        return bool(self.content.calls) or self.content.answer is not None


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
        alternatives = "|".join(
            re.escape(text) for text in sorted(texts, key=len, reverse=True) if text.strip()
        )
        self._texts = re.compile(alternatives) if alternatives else None

    def broken(self, text: str) -> str:
        """Returns the text with a space after the first character of each special token's text.
        Idempotent."""
        if self._texts is None:
            return text
        return self._texts.sub(
            lambda found: f"{found[0][0]} {found[0][1:]}" if len(found[0]) > 1 else " ", text
        )

    def count(self, ids: Sequence[int]) -> int:
        """Returns how many of the tokens are special."""
        return sum(token in self.ids for token in ids)


def _natural_unknown(tokenizer: Tokenizer) -> int | None:
    """Returns the unknown token's id where ordinary text can yield it, as in a word-level
    vocabulary, else None."""
    unknown: int | None = getattr(tokenizer, "unk_token_id", None)
    ids = tokenizer.encode("\u2603\u2604", add_special_tokens=False, split_special_tokens=True)
    return unknown if unknown in ids and unknown != tokenizer.eos_token_id else None


def clean(text: str, *, keep_controls: bool = False) -> str:
    """Returns text that every tokenizer takes: lone surrogates are replaced, and so are control
    characters.

    Line breaks and tabs stay; `keep_controls` keeps the other control characters too.
    """
    encodable = text.encode("utf-8", "replace").decode("utf-8")
    if keep_controls:
        return encodable
    return _CONTROLS.sub(" ", encodable.replace("\r\n", "\n").replace("\r", "\n"))


def boxed(text: str) -> str | None:
    """Returns what stands in the last \\boxed{} whose braces balance (escaped braces do not count),
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
    while (found := _TEXT.fullmatch(answer)) and boxed(f"\\boxed{{{found[1]}}}") == found[
        1
    ].strip():
        answer = found[1].strip()
    return answer


def shortest_prefix(decode: Callable[[Sequence[int]], str], ids: Sequence[int], text: str) -> int:
    """Returns how many leading tokens give a text that begins with `text`, as the text of all
    tokens does."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        if decode(ids[:middle]).startswith(text):
            high = middle
        else:
            low = middle + 1
    return low


def _input_of(tool: Tool) -> str:
    """What stands between the tags of a tool that takes more than a text."""
    signature = signature_of(tool)
    if signature.text_parameter is not None or not signature.schema.get("properties"):
        return ""
    return (
        " Its input is a JSON object:"
        f" {json.dumps(signature.schema['properties'], ensure_ascii=False)}"
    )


def system_prompt_for(
    tools: Sequence[Tool],
    require_think: bool,
    require_boxed: bool,
    *,
    mentions_retrieval: bool = False,
) -> str:
    """Returns a system prompt that explains the tags, from the tools that are on.

    Args:
        mentions_retrieval: say that context may come in retrieve tags (RAPO, arXiv 2603.03078).
    """
    answer = "\\boxed{...}" if require_boxed else "..."
    lines = ["Answer the user's question."]
    if require_think:
        lines.append("Begin each turn with your reasoning: <think>...</think>.")
    if tools:
        lines.append(
            f"{'Then either' if require_think else 'Either'} call one tool or give the answer."
        )
        lines.append("To call a tool, write its input between its tags and stop:")
        lines += [
            f"<{tool.name}>...</{tool.name}> {tool.description}{_input_of(tool)}" for tool in tools
        ]
        lines.append(
            "You will then be shown what it returned: <result>...</result>. Never write <result>"
            " yourself."
        )
        lines.append(f"Once you know the answer, write it and stop: <answer>{answer}</answer>.")
    else:
        lines.append(
            f"{'Then write' if require_think else 'Write'} the answer and stop:"
            f" <answer>{answer}</answer>."
        )
    if require_boxed:
        lines.append("The braces hold the bare answer, nothing else.")
    if mentions_retrieval:
        lines.append(
            "Extra context, a step of another agent, may come in <retrieve>...</retrieve>; never"
            " write that yourself."
        )
    return "\n".join(lines)
