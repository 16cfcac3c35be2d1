"""The agent of agent.py for a model that has never seen a tool: three solved questions come before
its own."""

import json
from typing import Any

from treegraft.examples.agent import agent

PROBLEM = "State the final answer to the following arithmetic problem:"


def solved(terms: str) -> list[Any]:
    """Returns the conversation of a solved question."""
    function = {"name": "add", "arguments": json.dumps({"terms": terms})}
    call = {"id": terms, "type": "function", "function": function}
    return [
        {"role": "user", "content": f"{PROBLEM} {terms} ="},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": terms, "content": agent.add(terms)},
        {"role": "assistant", "content": agent.add(terms)},
    ]


SHOWN = [*solved("7 + 5 - 4"), *solved("310 - 129"), *solved("2045 + 60 - 3 + 881")]


async def solve(task: Any, client: Any) -> str:
    """Answers a question."""
    return str(await agent.solve(task, client, SHOWN))
