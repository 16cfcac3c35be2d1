"""Compares answers in the child processes of `math_pool`. Run by file path, never imported."""

from __future__ import annotations

from math_verify import parse, verify


def answer(pair: list[str]) -> str:
    """Returns "equal", "different" or "unparsed" (the mathematics of a side cannot be read) for
    [prediction, reference]."""
    prediction, reference = pair
    try:
        # Its own time-outs need SIGALRM, which here belongs to our deadline.
        gold = parse(reference, parsing_timeout=None)
        target = parse(prediction, parsing_timeout=None)
        if not gold or not target:
            return "unparsed"
        return "equal" if verify(gold, target, timeout_seconds=None) else "different"
    except Exception:
        return "unparsed"


# The first comparison loads the parser, which takes seconds.
answer(["$\\frac{1}{2}$", "$0.5$"])
