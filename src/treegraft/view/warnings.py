"""The warnings that stand in a run's lines of metrics, as pages show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treegraft.runs.health import HealthWarning


def page_warnings(found: Sequence[Sequence[HealthWarning]]) -> list[list[dict[str, Any]]]:
    """Returns the warnings of each line as JSON: name, rule, text, and whether the warning begins
    with this line."""
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
    """Returns the rules that occur: name -> meaning, causes and advice."""
    rules = {one.rule.name: one.rule for warnings in found for one in warnings}
    return {
        name: {"meaning": rule.meaning, "causes": list(rule.causes), "advice": rule.advice}
        for name, rule in sorted(rules.items())
    }
