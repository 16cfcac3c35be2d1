"""The agent's tool: a typed function; the agent reads the first paragraph of its docstring."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def calculate(expression: str) -> str:
    """Calculates with whole numbers, such as 3 + 4 * 5."""
    return str(value(ast.parse(expression.strip(), mode="eval").body))


def value(node: ast.expr) -> int:
    """Returns the value of an expression. An exception becomes text that the agent reads."""
    match node:
        case ast.Constant(value=int(number)) if abs(number) < 10**6:
            return number
        case ast.BinOp(left, operation, right) if type(operation) in OPERATORS:
            return OPERATORS[type(operation)](value(left), value(right))
    raise ValueError("write whole numbers with +, - and *")
