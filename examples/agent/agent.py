"""An agent that owns its loop: it asks an OpenAI-compatible server and runs its one tool itself."""

import json
import re
from typing import Any

PARAMETERS = {"type": "object", "properties": {"terms": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}


def add(terms: str) -> str:
    """Returns the sum of whole numbers, such as "7 + 5 - 4"."""
    return str(sum(map(int, re.findall(r"[+-]?\d+", terms.replace(" ", "")))))


async def solve(task: Any, client: Any, shown: Any = ()) -> str:
    """Answers a question with at most three completions, after the messages `shown`."""
    messages = [*shown, {"role": "user", "content": task.question}]
    for _ in range(3):
        reply = await client.chat.completions.create(
            model="policy", messages=messages, tools=[TOOL]
        )
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return str(message.content)
        for call in message.tool_calls:
            # A call without terms raises, which ends the rollout as a violation.
            result = add(json.loads(call.function.arguments)["terms"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""
