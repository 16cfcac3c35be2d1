"""A tool and a reward of the page "Your own problem with a real model"."""

import ast
import operator
import re
from typing import Any

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calc(expression: str) -> str:
    """Works out an arithmetic expression.

    Args:
        expression: such as 3 * 4 + 1
    """

    def value(node: ast.expr) -> float:
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            operate = OPERATORS[type(node.op)]
            return float(operate(value(node.left), value(node.right)))
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            return node.value
        raise ValueError("only numbers and + - * / are allowed")

    return f"{value(ast.parse(expression, mode='eval').body):g}"


def near(completions: list[str], answer: list[int], **columns: Any) -> list[float]:
    """1 where the last number is the answer, less the farther it is from it, 0 without one."""
    rewards = []
    for text, expected in zip(completions, answer, strict=True):
        numbers = re.findall(r"-?\d+", text)
        error = abs(int(numbers[-1]) - expected) if numbers else None
        rewards.append(0.0 if error is None else 1.0 if error == 0 else 0.5 / (1 + error))
    return rewards
