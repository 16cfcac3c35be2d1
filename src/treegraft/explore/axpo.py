"""AXPO: where all tool users failed, a tool call is begun for the policy, again and again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress
from statistics import fmean

from treegraft.core.errors import SettingError, nearest
from treegraft.core.types import LEARNING_RULES, Origin, Retry, Start, Step, Trajectory, Tree
from treegraft.explore.independent import Independent
from treegraft.settings.explore import AxpoSettings, ExploreSettings

RULE = "axpo"


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
    `places = "answers"` is ours: where every rollout failed, steps that answered call a tool
    instead.
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
        own, paths = self._settings, tree.trajectories()
        if any(path.is_retry for path in paths):
            return Start(0)
        members = [path for path in paths if LEARNING_RULES[path.status].in_group]
        tried = [path for path in members if own.places == "answers" or path.num_tool_calls]
        if any((path.reward or 0.0) >= own.min_reward for path in tried):
            return Start(0)
        steps = {step.id: step for path in tried for step in self._places(path)}
        # Equal entropies by their place in the tree.
        ranked = sorted(steps.values(), key=lambda one: (-_uncertainty(one), one.ordinals))
        num_places = max(0, max_leaves - len(tree.leaves)) // own.num_retries
        tool = own.tool or None
        places = ranked[:num_places]
        return [Retry(one.id, own.num_retries, RULE, tool) for one in places] or Start(0)

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
    return fmean(compress(step.entropies, step.sampled_mask))


def check_tools(settings: ExploreSettings, names: Sequence[str]) -> None:
    """Raises SettingError where calls are begun for the agent and it has no such tool."""
    for name, wanted in (("axpo", settings.axpo.tool), ("commit", settings.commit.tool)):
        if name not in settings.explorers:
            continue
        if not names:
            raise SettingError(
                f"explore.explorers: got '{name}', which begins tool calls for the agent, but there"
                f" is no tool; expected at least one. Add one to tools.use, or leave '{name}' out."
            )
        if wanted and wanted not in names:
            raise SettingError(
                f"explore.{name}.tool: got '{wanted}', expected one of {', '.join(names)}, or an"
                f" empty text for the first.{nearest(wanted, names)}"
            )
