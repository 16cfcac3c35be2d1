"""The warnings of a run as the pages show them: those that its lines of metrics hold, or, for a run
recorded before there were any, those that the rules find in its metrics now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from treegraft.runs.health import HealthWarning, recorded, warnings_of

Line = Mapping[str, Any]


def standing(lines: Sequence[Line], config: Mapping[str, Any]) -> list[list[HealthWarning]]:
    """Returns for each line of metrics the warnings that stand after it.

    Args:
        config: the run's resolved settings.
    """
    return [recorded(line) for line in lines] if "health" in config else warnings_of(lines)


def shown(found: Sequence[Sequence[HealthWarning]]) -> list[list[dict[str, Any]]]:
    """Returns the same as JSON: each with its name, text and number, and whether it begins with
    this line."""
    before: set[str] = set()
    lines = []
    for warnings in found:
        lines.append(
            [
                {
                    "name": one.name,
                    "rule": one.rule.name,
                    "text": one.text,
                    "is_new": one.name not in before,
                }
                for one in warnings
            ]
        )
        before = {one.name for one in warnings}
    return lines


def explanations(found: Sequence[Sequence[HealthWarning]]) -> dict[str, dict[str, Any]]:
    """Returns what the rules that occur mean: name -> meaning, causes and advice."""
    rules = {one.rule.name: one.rule for warnings in found for one in warnings}
    return {
        name: {"meaning": rule.meaning, "causes": list(rule.causes), "advice": rule.advice}
        for name, rule in sorted(rules.items())
    }
