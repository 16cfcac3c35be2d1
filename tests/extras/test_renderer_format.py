"""Templates by the package renderers, against the families' own template texts."""

from __future__ import annotations

import copy
import functools
import itertools
import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.support.error_codes import raises_code
from tests.support.template_families import (
    FAMILIES,
    end_ids_of,
    template_of,
    tokenizer_of,
    tokenizer_with,
)

from treegraft.core.interfaces import Serving
from treegraft.core.types import Observation, Origin, StepContent, Task, ToolCall
from treegraft.extras.formats.rendered import RendererFormat
from treegraft.rollout.formats.answers import AnswerRule
from treegraft.rollout.formats.turns import described_tool, tool_schema

TEXT = {"type": "string", "description": "what is looked for"}
SEARCH = described_tool(
    "search", "Finds a passage.", {"type": "object", "properties": {"query": TEXT, "k": {}}}
)
ADD = described_tool(
    "add",
    "Adds two numbers.",
    {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": "number"},
            "exact": {"type": "boolean"},
            "more": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["a", "b"],
    },
)
TOOLS = [SEARCH, ADD]
SCHEMAS = [tool_schema(tool) for tool in TOOLS]
Message = dict[str, Any]


@functools.cache
def form_of(name: str) -> RendererFormat:
    return RendererFormat(
        tokenizer_of(name),
        TOOLS,
        template_options=FAMILIES[name].options,
        system_prompt="",
        require_think=False,
        require_boxed=False,
        answer=AnswerRule("whole"),
        end_ids=end_ids_of(name),
    )


def ids_by_template(name: str, messages: list[Message]) -> list[int]:
    """The reference: the family's own template, encoded as a whole."""
    tokenizer = tokenizer_of(name)
    text = tokenizer.apply_chat_template(
        copy.deepcopy(messages),
        tools=SCHEMAS,
        tokenize=False,
        add_generation_prompt=True,
        **FAMILIES[name].options,
    )
    return list(tokenizer.encode(text, add_special_tokens=False))


# Letters, digits, what JSON, XML and Python quote, and white space within.
WORDS = st.text("abz Z09.,:-_'\"{}[]\\/<>&=\n\téß中🙂", min_size=1, max_size=12).map(str.strip)
TEXTS = WORDS.filter(bool)


@st.composite
def calls(draw: Any) -> tuple[str, dict[str, Any]]:
    if draw(st.booleans()):
        return "search", {"query": draw(TEXTS)}
    found: dict[str, Any] = {"a": draw(st.integers(-9, 999)), "b": draw(st.sampled_from([1.5, 2]))}
    if draw(st.booleans()):
        found["exact"] = draw(st.booleans())
    if draw(st.booleans()):
        found["more"] = draw(st.lists(st.integers(0, 9), max_size=3))
    return "add", found


@st.composite
def conversations(draw: Any, name: str) -> list[Message]:
    """Five questions; before each answer up to two turns with calls and their results."""
    family = FAMILIES[name]
    numbers = itertools.count()
    messages: list[Message] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(TEXTS)})

    def turn(content: str) -> Message:
        message = {"role": "assistant", "content": content}
        if family.has_thoughts and draw(st.booleans()):
            message["reasoning_content"] = draw(TEXTS)
        return message

    for _ in range(5):
        messages.append({"role": "user", "content": draw(TEXTS)})
        for _ in range(draw(st.integers(0, 2))):
            found = draw(st.lists(calls(), min_size=1, max_size=3 if family.has_several else 1))
            message = turn(draw(TEXTS) if family.has_text and draw(st.booleans()) else "")
            message["tool_calls"] = [
                {
                    "id": f"call{next(numbers)}",
                    "type": "function",
                    "function": {"name": one, "arguments": arguments},
                }
                for one, arguments in found
            ]
            messages.append(message)
            messages += [
                {
                    "role": "tool",
                    "tool_call_id": call["id"],
                    "name": call["function"]["name"],
                    "content": draw(TEXTS),
                }
                for call in message["tool_calls"]
            ]
        messages.append(turn(draw(TEXTS)))
    return messages


@pytest.mark.parametrize("name", FAMILIES)
def test_the_template_decides_which_renderer_it_is(name: str) -> None:
    form = form_of(name)
    family = FAMILIES[name]
    assert form._name == family.renderer
    assert form._has_several == family.has_several
    assert form._has_text or not family.has_text
    assert isinstance(form, Serving)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_context_is_what_the_family_s_own_template_gives(name: str) -> None:
    """Before each of the agent's turns, over five questions: token for token."""
    form = form_of(name)

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(conversations(name))
    def check(messages: list[Message]) -> None:
        assume([form._harmless(one) for one in messages] == messages)
        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                before = messages[:place]
                assert form.conversation_ids(before, []) == ids_by_template(name, before)

    check()
