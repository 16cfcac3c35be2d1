"""An agent that owns its loop: it asks an OpenAI-compatible server and runs its one tool itself."""

from __future__ import annotations

import json
import re
from typing import Any

PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}}
FUNCTION = {"name": "calculate", "description": "Computes 2 * (3 + 4).", "parameters": PARAMETERS}


def calculate(expression: str) -> str:
    """Returns the value of an expression of numbers, + - * / and brackets."""
    if len(expression) > 200 or not re.fullmatch(r"(?!.*\*\*)[\d\s.+*/()-]+", expression):
        return "error: only numbers, + - * / and brackets"
    try:
        return str(eval(expression))
    except (ArithmeticError, SyntaxError, TypeError) as error:
        return f"error: {error}"


async def solve(task: Any, client: Any) -> str:
    """Answers a question, with at most three completions."""
    text = f"{task.question}\nCall calculate, then give the number alone."
    messages: list[Any] = [{"role": "user", "content": text}]
    tools = [{"type": "function", "function": FUNCTION}]
    for _ in range(3):
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return str(message.content)
        for call in message.tool_calls:
            body = json.loads(call.function.arguments)
            result = calculate(str(body.get("expression", "")))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""
