"""AXPO: where all tool users failed, a tool call is begun for the policy, again and again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any, Literal

from treegraft import Origin, Step, Trajectory, Tree
from treegraft.extras.methods.leaves import half_the_leaves
from treegraft.parts import (
    Contradiction,
    ExplorerKind,
    Independent,
    Registry,
    Retry,
    Settings,
    Start,
    setting,
)

RULE = "axpo"
MIN_REWARD = 1.0
"""Reward from which a rollout did not fail: that of a right answer."""


class AxpoSettings(Settings):
    """Retries of failed rollouts behind a forced tool-call opening (AXPO, arXiv 2605.28774)."""

    num_starts: int = setting(8, ge=1, default_of=half_the_leaves)
    """First-level rollouts, at most explore.num_leaves, of which half is the default; the rest are
    retries, where they are called for."""
    num_retries: int = setting(4, ge=1)
    """Retries of one step (AXPO's K); each such place is a group of its own."""
    places: Literal["calls", "answers"] = "calls"
    """Steps that are retried: "calls" (the paper) those that called a tool, where every rollout
    that called one failed; "answers" (ours) those that answered, where every rollout failed."""


class Axpo(Independent):
    """Opens first-level rollouts; where all of them that called a tool failed, steps with a call
    are tried again behind their own thought and the opening of the call.

    Source: AXPO (arXiv 2605.28774): for an all-wrong subgroup of tool users it keeps the thinking
    prefix and samples the tool call and all after it K = 4 times, at prefixes chosen by their
    uncertainty; each prefix is a group of its own. We have the abstract and its table, so this is
    assumed: uncertainty is the mean entropy of the tokens that the policy sampled in the step,
    highest first; as many steps are retried as K goes into the leaves that are left. Departures:
    thought and opening are forced tokens, so neither has loss in a retry, and the reward of a
    recovered prefix reaches the steps above it alone. A task with a success has no second stage.
    `places = "answers"` is ours: where every rollout failed, steps that answered call the first
    tool instead.
    """

    expands = True
    retries = True
    wants_rewards = True

    def __init__(self, settings: AxpoSettings) -> None:
        self._settings = settings

    def starts(self, max_leaves: int) -> Start:
        """Returns the first-level rollouts, or as many as there are leaves."""
        return Start(min(self._settings.num_starts, max_leaves))

    def fill(self, tree: Tree, max_leaves: int) -> Start | Sequence[Retry]:
        """Returns the retries, once; nothing where a rollout succeeded or no step qualifies."""
        own = self._settings
        paths = tree.trajectories()
        if any(path.is_retry for path in paths):
            return Start(0)
        members = [path for path in paths if path.status.rule.in_group]
        tried = [path for path in members if own.places == "answers" or path.num_tool_calls]
        if any((path.reward or 0.0) >= MIN_REWARD for path in tried):
            return Start(0)
        steps = {step.id: step for path in tried for step in self._places(path)}
        # Equal entropies by their place in the tree.
        ranked = sorted(steps.values(), key=lambda one: (-_uncertainty(one), one.ordinals))
        num_places = max(0, max_leaves - len(tree.leaves)) // own.num_retries
        places = ranked[:num_places]
        return [Retry(one.id, own.num_retries, RULE) for one in places] or Start(0)

    def _places(self, path: Trajectory) -> Iterator[Step]:
        for above, step in zip(path.steps, path.steps[1:], strict=False):
            content = step.content
            is_place = bool(content.observations)
            if self._settings.places == "answers":
                is_place = content.answer is not None
            is_known = above.parent is None or above.origin is Origin.POLICY
            if is_place and is_known and step.origin is Origin.POLICY and step.violation is None:
                yield step


def _uncertainty(step: Step) -> float:
    return fmean(step.sampled_entropies)


def _wrong(config: Any) -> Iterator[Contradiction]:
    explore = config.explore
    own = config.explore.axpo
    num_left = explore.num_leaves - own.num_starts
    if "axpo" in explore.explorers and 0 <= num_left < own.num_retries:
        yield Contradiction(
            ("explore.axpo.num_retries", "explore.axpo.num_starts", "explore.num_leaves"),
            f"explore.axpo.num_retries: got {own.num_retries}, expected at most {num_left}, which"
            f" explore.axpo.num_starts = {own.num_starts} leaves of explore.num_leaves ="
            f" {explore.num_leaves}; lower one of the first two, or raise num_leaves.",
        )


def register(registry: Registry) -> None:
    """Registers AXPO's explorer."""
    registry.explorer(
        "axpo",
        ExplorerKind(
            make=lambda explore, facts: Axpo(explore.axpo),
            title="AXPO",
            leads=True,
            leaves="explore.axpo.num_starts",
            opens_at_once=True,
            branches=True,
            begins_below=True,
            begins_calls=True,
        ),
        table=AxpoSettings,
        checks=(_wrong,),
    )
