"""A tool and a reward, for TRL's trainer and for trees in it."""

from typing import Any


def multiply(a: int, b: int) -> int:
    """Multiplies two whole numbers.

    Args:
        a: The first factor.
        b: The second factor.
    """
    return a * b


def correct(completions: list[Any], solution: list[str], **_: Any) -> list[float]:
    """Returns 1.0 where the completion names the solution."""
    pairs = zip(completions, solution, strict=True)
    return [float(f"\\boxed{{{right}}}" in str(text)) for text, right in pairs]
