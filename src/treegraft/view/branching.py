"""Change of the policy's entropy at branches and where one was considered, in nats."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from treegraft.core.types import BranchCause, Tree

_PROBE_TOKENS = 20
"""The default of `explore.entropy.probe_tokens`, for a run that recorded none."""


def entropy_changes(tree: Tree, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns what the branching rule compared, per token rather than in the rule's own unit.

    Args:
        config: the run's settings; those of explore.entropy say which tokens were compared.

    Returns:
        By the id of each branch, and of each step at which a branch was considered:
            change: mean change in nats per token; `before` and `after`: the two means.
            num: tokens compared.
            after_tool: the tool whose result precedes these tokens; None without a call.
        Steps without comparable tokens are left out.
    """
    own = config.get("explore", {}).get("entropy", {})
    count = own.get("probe_tokens", _PROBE_TOKENS)
    is_lagging = own.get("statistic") == "lagging"
    steps = {step.id: step for step in tree.steps}
    # Of several children of a step, one was looked at; its sibling branches share its numbers.
    seen_below: dict[str, dict[str, Any]] = {}
    found = {}
    for step in tree.steps:
        if step.decision is None or step.parent is None:
            continue
        start = steps[".".join(step.id.split(".")[:2])]
        now = steps[step.parent] if is_lagging else step
        change = _compared(now.sampled_entropies[:count], start.sampled_entropies[:count])
        if change is None:
            continue
        calls = steps[step.parent].content.calls
        found[step.id] = change | {"after_tool": calls[-1].name if calls else None}
        if step.decision.num_opened:
            seen_below[step.parent] = found[step.id]
    for step in tree.steps:
        if isinstance(step.cause, BranchCause) and step.parent in seen_below:
            found[step.id] = seen_below[step.parent]
    return found


def _compared(now: list[float], then: list[float]) -> dict[str, Any] | None:
    num = min(len(now), len(then))
    if num == 0:
        return None
    after = fmean(now[:num])
    before = fmean(then[:num])
    return {"change": after - before, "before": before, "after": after, "num": num}


def content_numbers(tree: Tree) -> dict[str, int]:
    """Returns for each step a number that it shares with the steps of the same tokens by the same
    authors."""
    numbers: dict[tuple[bytes, bytes], int] = {}
    found = {}
    for step in tree.steps:
        key = (step.token_ids.tobytes(), step.origins.tobytes())
        found[step.id] = numbers.setdefault(key, len(numbers))
    return found
