"""Replies of models of many families, as servers hand them over: what reaches the buffer, what is
refused, and what asking costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.rollout.test_format_chat import TOOLS, form_of
from tests.traces.test_agents import endpoint, said, serving, solve
from tests.traces.test_build_traces import Numbered, build

from treegraft.core.chat_client import ChatReply
from treegraft.core.errors import EngineError
from treegraft.core.types import Observation, StepContent, Task, ToolCall
from treegraft.rollout.formats.chat import ChatFormat
from treegraft.rollout.formats.markup import Violation
from treegraft.settings.explore import BuildSettings
from treegraft.settings.tools import ToolsSettings
from treegraft.tools.toolbox import Toolbox
from treegraft.traces.agents import Attempt
from treegraft.traces.collect import BuildReport
from treegraft.traces.endpoint import EndpointAgent, EndpointSettings, Estimate, most_asked
from treegraft.traces.replies import read_reply, with_thought

TASK = Task(id="t/1", question="What is r2 of e9?", reference=("e41",))
CALL = {"name": "search", "arguments": {"query": "r2 of e9"}}
JSON = json.dumps(CALL)
STEP = StepContent(thought="Look it up.", calls=(ToolCall("search", "r2 of e9"),))


def form() -> ChatFormat:
    return form_of("qwen3", require_think=False)


def function(call: dict[str, Any], **more: Any) -> dict[str, Any]:
    arguments = json.dumps(call["arguments"])
    return {"id": "abc", "type": "function", "function": {**call, "arguments": arguments}, **more}


FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "openai": (
        {"content": "Look it up.", "tool_calls": [function(CALL)]},
        {"content": "It is clear.\n\\boxed{e41}"},
    ),
    "qwen3": (
        {"content": f"<think>\nLook it up.\n</think>\n\n<tool_call>\n{JSON}\n</tool_call>"},
        {"content": "<think>\nIt is clear.\n</think>\n\n\\boxed{e41}"},
    ),
    "hermes, prose before and after": (
        {"content": f"Look it up.\n<tool_call>\n{JSON}\n</tool_call>\nI wait for the result."},
        {"content": "It is clear.\nThe answer: \\boxed{e41}. Anything else?"},
    ),
    "llama 3.1": (
        {"content": f"Look it up.<|python_tag|>{JSON.replace('arguments', 'parameters')}"},
        {"content": "It is clear. \\boxed{e41}"},
    ),
    "mistral": (
        {"content": f"Look it up.[TOOL_CALLS] [{JSON}]"},
        {"content": "It is clear.\n\\boxed{e41}"},
    ),
    "json in a fence": (
        {"content": f"Look it up.\n```json\n{JSON}\n```\n"},
        {"content": "It is clear.\n\n$\\boxed{e41}$"},
    ),
    "deepseek-r1": (
        {"content": None, "reasoning_content": "Look it up.\n", "tool_calls": [function(CALL)]},
        {"content": "\\boxed{e41}", "reasoning_content": "It is clear."},
    ),
    "a thought that the template opened": (
        {"content": f"Look it up.\n</think>\n<tool_call>{JSON}</tool_call>"},
        {"content": "It is clear.</think>\\boxed{e41}"},
    ),
}


def message(given: dict[str, Any]) -> tuple[int, Any]:
    usage = {"prompt_tokens": 100, "completion_tokens": 7}
    return 200, {
        "choices": [{"message": {"role": "assistant", **given}, "finish_reason": "stop"}],
        "usage": usage,
    }


def agent(url: str) -> EndpointAgent:
    settings = EndpointSettings(url=url, model="m", system_prompt="tags", backoff_s=0.001)
    tools = ToolsSettings(deadline_s=5.0, max_output_chars=200, cache=False, max_concurrent=4)
    tags = endpoint(url)._tags._format
    return EndpointAgent(
        settings,
        tags,
        Toolbox(TOOLS, tools),
        seed=0,
        source="server",
        chat=form(),
        tools=TOOLS,
    )


@pytest.mark.parametrize("family", list(FAMILIES))
def test_what_each_family_says_reaches_the_buffer(family: str) -> None:
    replies = FAMILIES[family]
    with serving(lambda body, n: message(replies[n])) as (url, seen):
        attempt = solve(agent(url), TASK)
    assert attempt.error is None, attempt
    first, last = attempt.contents
    assert first.calls == STEP.calls
    assert first.thought == "Look it up."
    assert [one.text for one in first.observations] == ["about r2 of e9"]
    assert last.answer == "e41"
    assert last.thought.startswith("It is clear.")
    assert (attempt.num_requests, attempt.num_tokens) == (2, (200, 14))
    # The recipe's own agent is told the same: tools in their field, no word of tags.
    assert [one["function"]["name"] for one in seen[0]["tools"]] == ["search", "add"]
    assert "stop" not in seen[0]
    assert "<search>" not in json.dumps(seen[0]["messages"])
    call, result = seen[1]["messages"][-2:]
    (field,) = call["tool_calls"]
    assert json.loads(field["function"]["arguments"]) == CALL["arguments"]
    assert result == {"role": "tool", "tool_call_id": field["id"], "content": "about r2 of e9"}


def test_several_calls_and_made_up_results() -> None:
    other = json.dumps({"name": "add", "arguments": {"a": 1, "b": 2}})
    two = f"<tool_call>{JSON}</tool_call>\n<tool_call>{other}</tool_call>"
    read = read_reply(ChatReply(two), form(), 3)
    assert [one.name for one in read.content.calls] == ["search", "add"]
    assert json.loads(read.content.calls[1].body) == {"a": 1, "b": 2}
    assert [one["id"] for one in read.message["tool_calls"]] == ["call03000", "call03001"]
    results = read.results([Observation(text="x"), Observation(text="y")])
    assert [one["tool_call_id"] for one in results] == ["call03000", "call03001"]
    invented = f"{JSON}\n<tool_response>e41</tool_response>\n{other}"
    assert len(read_reply(ChatReply(invented), form(), 0).content.calls) == 1


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (ChatReply("I'm sorry, but I can't help with that."), "without \\boxed{}"),
        (ChatReply(""), "neither a call nor an answer"),
        (ChatReply("<think>hm"), "a thought without </think>"),
        (ChatReply("It is", is_cut=True), "cut at its limit of tokens"),
        (ChatReply("<tool_call>{'name': 'search'}</tool_call>"), "<tool_call> without a call"),
        (ChatReply("[TOOL_CALLS] search(x)"), "[TOOL_CALLS] without a call"),
        (ChatReply("", calls=({"name": "search", "arguments": "{oops"},)), "without a name and"),
        (ChatReply("{" * 5_000), "without \\boxed{}"),
    ],
)
def test_what_holds_no_step_is_refused(reply: ChatReply, reason: str) -> None:
    with pytest.raises(Violation) as caught:
        read_reply(reply, form(), 0)
    assert reason in str(caught.value)


def test_an_answer_needs_the_box_only_where_the_recipe_does() -> None:
    loose = form_of("qwen3", require_think=False, require_boxed=False)
    assert read_reply(ChatReply("e41"), loose, 0).content == StepContent(answer="e41")
    # A mapping that is no call is text.
    text = 'It maps {"name": "e41"}'
    assert read_reply(ChatReply(text), loose, 0).content.answer == text


def test_a_server_without_tools_is_asked_in_tags() -> None:
    def reply(body: dict[str, Any], number: int) -> tuple[int, Any]:
        if "tools" in body:
            return 400, {"message": '"auto" tool choice requires --enable-auto-tool-choice'}
        return said("<answer> \\boxed{e41} ")

    with serving(reply) as (url, seen):
        asked = agent(url)
        attempt = solve(asked, TASK)
    assert attempt.contents == (StepContent(answer="e41"),)
    assert "tool choice" in asked.refusal
    assert [("tools" in one, one["messages"][0]["content"]) for one in seen] == [
        (True, form().system_prompt),
        (False, "tags"),
    ]


@pytest.mark.parametrize(
    ("text", "thought"),
    [
        ("I will look. <search> e9 r2 </search>", "I will look."),
        ("<think>a</think> So: <search> e9 r2 </search>", "a\nSo:"),
        ("So: <think>a</think><search> e9 r2 </search>", "So:\na"),
    ],
)
def test_text_before_a_tag_is_the_thought(text: str, thought: str) -> None:
    replies = [text, "It is e1. <answer> \\boxed{e1} </answer>"]
    with serving(lambda body, n: said(replies[n])) as (url, _):
        attempt = solve(endpoint(url), TASK)
    assert [one.thought for one in attempt.contents] == [thought, "It is e1."]
    assert with_thought("no tag", ["search"]) == "no tag"


def test_half_of_the_replies_refused_ends_the_build(tmp_path: Path) -> None:
    def numbered(num_refused: int) -> Numbered:
        refused = {
            n: Attempt(error=f"reason {n % 5}", refused=f"Sorry {n}", num_requests=1)
            for n in range(num_refused)
        }
        return Numbered(set(range(16)), refused)

    report = BuildReport()
    with pytest.raises(EngineError, match=r"18 of 32 attempts ended .* more than half"):
        build(tmp_path / "a", numbered(9), num_samples=16, report=report)
    assert report.refused == {f"reason {n}": f"Sorry {n}" for n in range(3)}
    half, _ = build(tmp_path / "b", numbered(8), num_samples=16)
    assert (half.num_refused, half.num_attempts) == (48, 96)


def test_the_most_that_is_asked_by_hand() -> None:
    settings = EndpointSettings(
        url="http://h", model="m", max_agent_steps=8, max_tool_calls=2, max_reply_tokens=10
    )
    # Three requests: 25 + (25 + 15) + (25 + 30) tokens read, 10 written each.
    assert most_asked(settings, 4, 100.0, 20) == Estimate(12, 4 * 120, 4 * 30)
    report = BuildReport(num_read=2_000_000, num_written=500_000)
    assert report.cost(BuildSettings(price_read=0.5, price_written=2.0)) == 2.0
