"""Rewards that make an agent call its tools: baselines of methods that explore."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from treegraft import Origin, Status, Trajectory, exact_match, math_equal
from treegraft.parts import Registry

MOST_CALLS = 5
"""Calls of a trajectory that are rewarded."""


def own_calls(path: Trajectory) -> list[tuple[str, str]]:
    """Returns name and body of each call that the policy wrote and a tool answered."""
    found = []
    for step in path.steps:
        if step.origin is Origin.POLICY:
            # A call without a result did not run.
            for call, _ in zip(step.content.calls, step.content.observations, strict=False):
                found.append((call.name, call.body.strip()))
    return found


def is_right(path: Trajectory) -> bool:
    """Returns whether a completed trajectory's answer matches exactly or is equal mathematics."""
    answer = path.leaf.answer
    accepted = path.task.reference
    if path.status is not Status.COMPLETED or answer is None or not accepted:
        return False
    return exact_match(answer, accepted) == 1.0 or math_equal(answer, accepted) == 1.0


def call_bonus(*, trajectories: Sequence[Trajectory], **_: Any) -> list[float]:
    """Returns the calls of each wrong trajectory, 0..MOST_CALLS; 0 for a right one.

    B_i = [answer i is wrong] · min(number of calls, 5)

    With a small weight (0.1) it lifts rollouts that tried over those that answered at once, where
    all of them failed. Source: the auxiliary reward for tool calls of SPEAR (arXiv 2509.22601) in
    its simplest form. Departures: SPEAR lets it decay over 100 steps and gives it to every
    trajectory.
    """
    found = []
    for path in trajectories:
        found.append(0.0 if is_right(path) else float(min(len(own_calls(path)), MOST_CALLS)))
    return found


def call_novelty(*, trajectories: Sequence[Trajectory], **_: Any) -> list[float]:
    """Returns how rare the calls of each trajectory are in its group, 0..1; 0 without a call.

    N_i = mean over the calls c of trajectory i of 1 / √n(c), n(c) the trajectories of the group
    that make the call c

    Source: the count-based bonus 1 / √n of Strehl & Littman (MBIE-EB, 2008). Departure: counts are
    those of one group, not of all training, so that a reward depends on its tree alone and a
    resumed run gives the same one.
    """
    calls = [own_calls(path) for path in trajectories]
    counts = Counter(call for one in calls for call in set(one))
    return [sum(counts[call] ** -0.5 for call in one) / max(1, len(one)) for one in calls]


_HERE = "treegraft.extras.methods.call_rewards"


def register(registry: Registry) -> None:
    """Registers two rewards for calls."""
    registry.reward("call_bonus", f"{_HERE}:call_bonus")
    registry.reward("call_novelty", f"{_HERE}:call_novelty")
