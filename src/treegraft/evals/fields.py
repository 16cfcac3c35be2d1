"""Columns of a row, whatever its file calls them: names in order of preference, dots into nested
columns, any case."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

QUESTION_COLUMNS = (
    "extra_info.question",
    "question",
    "problem",
    "query",
    "instruction",
    "prompt",
    "input",
)
"""Where a question is looked for; the first column that a row has."""
REFERENCE_COLUMNS = (
    "reward_model.ground_truth",
    "answer",
    "reference",
    "final answer",
    "golden_answers",
    "target",
    "solution",
)
"""Where a reference is looked for."""

# Tabs and line breaks belong to text; the others are mostly what a lost backslash leaves: a
# backspace and "oxed".
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")

_MISSING = object()


def find_value(values: Mapping[str, Any], names: Sequence[str]) -> tuple[str, Any] | None:
    """Returns the first of the named columns that the row has, with its value; None where it has
    none of them."""
    for name in names:
        value = _reach(values, name)
        if value is not _MISSING:
            return name, value
    return None


def _reach(values: Mapping[str, Any], name: str) -> Any:
    value = _entry(values, name)
    if value is not _MISSING:
        return value
    value = values
    for part in name.split("."):
        value = _entry(value, part) if isinstance(value, Mapping) else _MISSING
    return value


def _entry(values: Mapping[str, Any], name: str) -> Any:
    if name in values:
        return values[name]
    return next((value for key, value in values.items() if key.lower() == name.lower()), _MISSING)


def accepted_answers(value: Any) -> tuple[str, ...]:
    """Returns the texts of a reference, a single one or a list, that are not blank, each once."""
    values = value if isinstance(value, (list, tuple)) else [value]
    texts = (
        str(one).strip()
        for one in values
        if one is not None and not (isinstance(one, float) and math.isnan(one))
    )
    return tuple(dict.fromkeys(text for text in texts if text))


def question_text(value: Any) -> str:
    """Returns a question as text; of a list of chat messages the last one by the user."""
    if isinstance(value, (list, tuple)):
        texts = [
            one.get("content")
            for one in value
            if isinstance(one, Mapping) and one.get("role") == "user"
        ]
        value = texts[-1] if texts else ""
    return "" if value is None else str(value)


def last_boxed(text: str) -> str | None:
    """Returns what the last \\boxed{} of a text holds, braces balanced; None where there is
    none."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed{")
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth < 0:
            return text[begin:position].strip()
    return None


def control_places(value: Any, path: str) -> list[tuple[str, str]]:
    """Returns (column, text around the first control character) for each text in `value` that holds
    one."""
    if isinstance(value, str):
        found = CONTROL.search(value)
        return [(path, value[max(0, found.start() - 12) : found.end() + 12])] if found else []
    if isinstance(value, Mapping):
        return [
            place
            for key, one in value.items()
            for place in control_places(one, f"{path}.{key}" if path else str(key))
        ]
    if isinstance(value, (list, tuple)):
        return list(dict.fromkeys(place for one in value for place in control_places(one, path)))
    return []
