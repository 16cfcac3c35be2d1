"""ECPO's credit: actions taken in the same state are compared, and rare ones count for less."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from statistics import fmean
from typing import Any, Literal

from treegraft import Step, Trajectory
from treegraft.parts import Registry, Settings, setting, when

Instance = tuple[tuple[int, str], Hashable, float]
"""(number of the trajectory, step id), action, and return of a step in a state."""


class _CreditFields(Settings):
    evidence: float = setting(1.0, ge=0, idle_unless=when("credit.attribution", "evidence"))
    """ECPO's shrinkage: an action seen n times in a state keeps n / (n + this) of its advantage."""


def action_advantages(
    instances: Sequence[Instance], *, evidence: float, eps: float, divides: bool = True
) -> dict[tuple[int, str], float]:
    """Returns the advantage of each step of one state.

        A(a) = g · n_a / (n_a + k) · (R̄_a - R̄) / (std + eps)
        g    = B / (B + W),   B = Σ_a n_a (R̄_a - R̄)² / n,   W = Σ_i (R_i - R̄_a(i))² / n

    with n_a the steps with action a and R̄_a their mean return, n, R̄ and std of the whole state, and
    k the evidence that is asked for. Actions of equal means have 0.

    Source: ECPO (Li et al., arXiv 2606.05885): "evidence-calibrated action advantage, which groups
    rollouts by canonical actions and shrinks low-count estimates", and "variance-gated credit
    weighting, which suppresses anchor states dominated by within-action noise". We have the
    abstract, so both formulas are assumed: n / (n + k) with k = 1, and the share of the variance
    that lies between actions.

    Args:
        divides: by the deviation; False for a credit that does not.
    """
    returns = [value for *_, value in instances]
    mean = fmean(returns)
    by_action = defaultdict[Hashable, list[float]](list)
    for _, action, value in instances:
        by_action[action].append(value)
    means = {action: fmean(values) for action, values in by_action.items()}
    between = fmean((means[action] - mean) ** 2 for _, action, _ in instances)
    within = fmean((value - means[action]) ** 2 for _, action, value in instances)
    if between <= 0.0:
        return {name: 0.0 for name, *_ in instances}
    scale = (between + within) ** 0.5 + eps if divides else 1.0
    gate = between / (between + within)
    return {
        name: gate * count / (count + evidence) * (means[action] - mean) / scale
        for name, action, _ in instances
        for count in (len(by_action[action]),)
    }


def action_of(step: Step) -> Hashable:
    """Returns a step's canonical action: its calls, or its answer, without thought, case and
    surplus spaces."""
    content = step.content
    calls = tuple((call.name, _canonical(call.body)) for call in content.calls)
    return calls, None if content.answer is None else _canonical(content.answer)


def _canonical(text: str) -> str:
    return " ".join(text.casefold().split())


def evidence(
    members: Sequence[Trajectory], *, credit: Any, scale: Literal["std", "none", "leave-one-out"]
) -> Mapping[tuple[int, str], float]:
    """Returns ω A(a) by (number of the trajectory, step id), by the table [credit].

    States and discounted returns are GiGPO's (see `gigpo_math.state_advantages`): what the agent
    was shown last.
    """
    # numpy comes with it, and commands load this module without.
    from treegraft.extras.methods.gigpo_math import discounted_returns

    states = defaultdict[tuple[str, ...], list[Instance]](list)
    for index, path in enumerate(members):
        seen: tuple[str, ...] = ()
        shown = []
        for step in path.steps[1:]:
            if step.num_sampled:
                shown.append((seen, step))
            seen = tuple(one.text for one in step.content.observations)
        returns = discounted_returns(path.leaf.reward or 0.0, len(shown), credit.discount)
        for (state, step), value in zip(shown, returns, strict=True):
            states[state].append(((index, step.id), action_of(step), value))
    own = {"evidence": credit.evidence, "eps": credit.eps, "divides": scale == "std"}
    return {
        place: credit.state_weight * value
        for instances in states.values()
        for place, value in action_advantages(instances, **own).items()
    }


def register(registry: Registry) -> None:
    """Registers ECPO's credit of actions."""
    registry.credit(
        "evidence",
        "treegraft.extras.methods.ecpo:evidence",
        role="attribution",
        settings={"credit": _CreditFields},
    )
