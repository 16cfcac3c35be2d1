"""What is wrong with an update, as far as its metrics say: marks for the charts and the list."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from treegraft.metrics import find_meaning

Line = Mapping[str, Any]


def _at_least(key: str, limit: float) -> Callable[[Line], bool]:
    def holds(line: Line) -> bool:
        value = line.get(key)
        return isinstance(value, int | float) and value >= limit

    return holds


_RULES: Sequence[tuple[Callable[[Line], bool], str]] = (
    (_at_least("rollout/failed_frac", 1e-9), "trajectories were lost to failures of ours: {rollout/failed_frac:.1%}"),
    (
        _at_least("rollout/truncated_frac", 0.25),
        "many trajectories ran out of tokens, steps or calls: {rollout/truncated_frac:.0%}",
    ),
    (_at_least("rollout/violation_frac", 0.5), "most trajectories broke the format: {rollout/violation_frac:.0%}"),
    (_at_least("learn/skipped_groups_frac", 1.0), "no group had a variance of reward: nothing was learned"),
    (lambda line: line.get("rollout/num_tool_calls") == 0, "no tool was called"),
    (lambda line: line.get("learn/grad_norm") == 0, "the gradient was 0: the policy did not move"),
    (_at_least("eval/failed_frac", 1e-9), "held-out trajectories were lost to failures of ours: {eval/failed_frac:.1%}"),
)
COLLAPSE = 0.05
"""Entropy below this share of the first update's."""


def warnings_of(lines: Sequence[Line]) -> list[list[str]]:
    """Returns for each line of metrics its warnings, in words."""
    first = next((line["learn/entropy"] for line in lines if isinstance(line.get("learn/entropy"), float)), None)
    return [_of_line(line, first) for line in lines]


def _of_line(line: Line, first_entropy: float | None) -> list[str]:
    found = [text.format_map(line) for holds, text in _RULES if holds(line)]
    for key, value in line.items():
        if isinstance(value, str):
            found.append(f"{key} is {value}")
        elif key.startswith("health/") and value:
            found.append(find_meaning(key) or key)
        elif key.startswith("tools/") and key.endswith("_failure_frac") and value >= 0.5:
            found.append(f"the tool {key.removeprefix('tools/').removesuffix('_failure_frac')} failed in {value:.0%} of its calls")
    entropy = line.get("learn/entropy")
    if isinstance(entropy, float) and first_entropy and entropy < COLLAPSE * first_entropy:
        found.append(f"entropy fell to {entropy / first_entropy:.1%} of the first update's")
    return found
