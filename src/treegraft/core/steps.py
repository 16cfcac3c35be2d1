"""Steps as warm-up and import read them from files.

A trajectory is [{"thought", "calls": [{"name", "body"}], "observations": [text], "answer"}]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treegraft.core.types import Observation, StepContent, ToolCall


def text_of(value: Any, field: str) -> str:
    """Returns the value of a field, which has to be text; raises ValueError where it is not."""
    if not isinstance(value, str):
        raise ValueError(f"{field} is {value!r:.40}, expected text")
    return value


def observation_from(fields: Mapping[str, Any]) -> Observation:
    """Returns an observation from its recorded fields."""
    # Records of 0.6 have one field more, which said nothing.
    return Observation(**{name: fields[name] for name in fields if name != "is_cached"})


def read_steps(rows: Any) -> tuple[StepContent, ...]:
    """Returns the steps of such a trajectory; each part is optional.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: another shape.
    """
    steps: list[StepContent] = []
    for row in rows:
        # `or ()`: files written by other programs hold null for a part that is not there.
        calls = [
            ToolCall(text_of(call["name"], "name"), text_of(call["body"], "body"))
            for call in row.get("calls") or ()
        ]
        results = [text_of(text, "observation") for text in row.get("observations") or ()]
        answer = row.get("answer")
        step = StepContent(
            thought=text_of(row.get("thought") or "", "thought"),
            calls=tuple(calls),
            observations=tuple(Observation(text=text) for text in results),
            answer=None if answer is None else text_of(answer, "answer"),
        )
        steps.append(step)
    if not steps:
        raise ValueError("no steps")
    return tuple(steps)
