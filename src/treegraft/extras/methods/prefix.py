"""Rollouts below steps of a stored trajectory of the same task, and stored trajectories as
leaves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from treegraft import Tree
from treegraft.extras.methods.leaves import half_the_leaves
from treegraft.parts import (
    Below,
    Contradiction,
    ExplorerKind,
    Independent,
    Registry,
    RestartCause,
    Settings,
    Start,
    Stored,
    interfaces,
    keyed,
    setting,
    value_of,
)


def _restarts(config: Any) -> int:
    if value_of(config, "explore.prefix.rule") == "whole":
        return 1
    return half_the_leaves(config)


NUM_PROBES = 2
"""Leaves with which "bread" tries a place, the fewest that can differ; what its search leaves over
goes to the place that it found."""


class PrefixSettings(Settings):
    """Stored trajectories of the task itself: rollouts below their first steps (PrefixRL, arXiv
    2601.18795; BREAD, arXiv 2506.17211), or whole ones in the group (LUFFY, arXiv 2504.14945)."""

    rule: Literal["prefixrl", "bread", "whole"] = "prefixrl"
    """"prefixrl" begins rollouts below a number of steps drawn at random; "bread" only where all
    own rollouts failed, below as few steps as give a success; "whole" takes the stored trajectory
    itself as a leaf of the group (LUFFY)."""
    num_restarts: int = setting(8, ge=1, default_of=_restarts)
    """Leaves of explore.num_leaves that begin below stored steps, half of them by default; with
    "whole" stored trajectories that are leaves, 1 by default. The others begin at the prompt."""
    min_reward: float = 1.0
    """Reward from which a stored trajectory is used, and from which a rollout is a success."""


class UniformPrefix(Independent):
    """Opens some leaves at the prompt, and the others below the first steps of the task's best
    stored trajectory, how many is drawn evenly.

    Source: PrefixRL (arXiv 2601.18795): on-policy learning on prefixed problems, whose prefixes are
    context and never targets, mixed with the problems themselves. Each place is a group of its own,
    as the prefixed problem is in the paper. Departures: a tree holds both, so the share of
    prefixes is one of leaves; a prefix ends with a step.
    """

    rule = "prefixrl"

    def __init__(self, settings: PrefixSettings) -> None:
        """Takes the number of leaves below stored steps from the settings."""
        self._settings = settings

    def starts(self, max_leaves: int) -> Start:
        """Returns the leaves at the prompt."""
        return Start(max(0, max_leaves - self._settings.num_restarts))

    def usable(self, stored: Sequence[Stored]) -> list[int]:
        """Returns the numbers of the stored trajectories that were good enough, best first."""
        return [n for n, one in enumerate(stored) if one.reward >= self._settings.min_reward]

    def best(self, stored: Sequence[Stored]) -> int | None:
        """Returns the number of the best one that rollouts can begin below; None without one."""
        return next((n for n in self.usable(stored) if stored[n].num_steps), None)

    def restarts(
        self, tree: Tree, stored: Sequence[Stored], max_leaves: int, noise_key: interfaces.NoiseKey
    ) -> Sequence[Start]:
        """Returns all leaves at once; later those that are missing, at the prompt."""
        best = self.best(stored)
        if tree.leaves or best is None:
            return [Start(max_leaves - len(tree.leaves))]
        own = self.starts(max_leaves)
        if own.num == max_leaves:
            return [own]
        # One place for all: a group needs several leaves.
        num_steps = 1 + keyed.keyed_int(*noise_key, "prefix", 0) % stored[best].num_steps
        return [own, Start(max_leaves - own.num, Below(best, num_steps, self.rule))]


class ShortestPrefix(UniformPrefix):
    """Where all own rollouts failed, looks for the shortest prefix of the best stored trajectory
    from which some succeed, and spends the other leaves there.

    Source: BREAD (arXiv 2506.17211): branched rollouts from expert anchors, by binary search, for
    tasks that the agent does not solve. Departures: the search is paid from the tree's own leaves;
    those of the places that were tried stay in the tree, each place a group of its own; a
    prefix ends with a step; where even the longest prefix gives no success, the leaves that are
    left begin at the prompt.
    """

    rule = "bread"
    wants_rewards = True

    def restarts(
        self, tree: Tree, stored: Sequence[Stored], max_leaves: int, noise_key: interfaces.NoiseKey
    ) -> Sequence[Start]:
        """Returns the own rollouts; then, one at a time, the places that the search tries; then
        what is left, at the place it found, or at the prompt where an own rollout succeeded or no
        prefix helps."""
        if not tree.leaves:
            return [self.starts(max_leaves)]
        missing = Start(max_leaves - len(tree.leaves))
        best = self.best(stored)
        succeeded = self._successes(tree)
        # Own rollouts that all failed for a reason of ours say nothing about the task.
        if best is None or succeeded.get(0, True) or missing.num <= 0:
            return [missing]
        # Every prefix up to `low` failed; `high` is the shortest that succeeded.
        low = max((place for place, is_won in succeeded.items() if not is_won), default=0)
        high = min((place for place, is_won in succeeded.items() if is_won), default=None)
        if high is not None and high - low <= 1:
            return [Start(missing.num, Below(best, high, self.rule))]
        last = stored[best].num_steps if high is None else high
        if low >= last:
            return [missing]
        num = min(NUM_PROBES, missing.num)
        return [Start(num, Below(best, (low + last + 1) // 2, self.rule))]

    def _successes(self, tree: Tree) -> dict[int, bool]:
        """Whether any rollout succeeded, by the number of stored steps above it; places whose
        rollouts all failed for a reason of ours are left out."""
        found: dict[int, bool] = {}
        for path in tree.trajectories():
            if not path.status.rule.in_group:
                continue
            causes = [step.cause for step in path.steps]
            above = [one.num_steps for one in causes if isinstance(one, RestartCause)]
            place = above[-1] if above else 0
            is_won = path.reward is not None and path.reward >= self._settings.min_reward
            found[place] = found.get(place, False) or is_won
        return found


class WholeTrajectory(UniformPrefix):
    """Takes the best stored trajectories themselves as leaves of the group, beside own rollouts.

    Source: LUFFY (arXiv 2504.14945): 7 rollouts and 1 expert trajectory. Its loss on them is
    loss.graft_coef = 1 with loss.graft_form = "luffy". Their rewards enter the group's statistics,
    as in its script.
    """

    def restarts(
        self, tree: Tree, stored: Sequence[Stored], max_leaves: int, noise_key: interfaces.NoiseKey
    ) -> Sequence[Start]:
        """Returns all leaves at once; later those that are missing, at the prompt."""
        if tree.leaves:
            return [Start(max_leaves - len(tree.leaves))]
        whole = [number for number in self.usable(stored) if stored[number].has_answer]
        chosen = whole[: self._settings.num_restarts]
        own = Start(max_leaves - len(chosen))
        return [own, *(Start(1, Below(number, None)) for number in chosen)]


PREFIX_RULES = {"prefixrl": UniformPrefix, "bread": ShortestPrefix, "whole": WholeTrajectory}


TITLES = {"prefixrl": "PrefixRL", "bread": "BREAD", "whole": "LUFFY"}


def _is_whole(config: Any) -> bool:
    return bool(config.explore.prefix.rule == "whole")


def _wrong(config: Any) -> Iterator[Contradiction]:
    explore = config.explore
    if "prefix" not in explore.explorers:
        return
    if "graft" in explore.explorers:
        yield Contradiction(
            ("explore.explorers",),
            f'explore.explorers: got {explore.explorers}; expected one of "graft" and "prefix":'
            " no paper says how a stored step that is history and one that is a graft share their"
            " credit.",
        )
    own = explore.prefix
    num_leaves = explore.num_leaves
    if own.rule == "bread" and own.num_restarts == num_leaves:
        yield Contradiction(
            ("explore.prefix.num_restarts", "explore.num_leaves"),
            f"explore.prefix.num_restarts: got {own.num_restarts}, expected less than"
            f' explore.num_leaves, which is {num_leaves}: "bread" needs rollouts from the prompt,'
            " which show whether the agent solves the task.",
        )
    if not config.buffer.allow_same_task:
        yield Contradiction(
            ("buffer.allow_same_task", "explore.explorers"),
            'buffer.allow_same_task: got false, but explore.explorers has "prefix", whose rollouts'
            " begin below stored trajectories of the very same task; expected true.",
        )


def register(registry: Registry) -> None:
    """Registers the rules of stored prefixes."""
    registry.explorer(
        "prefix",
        ExplorerKind(
            make=lambda explore, facts: PREFIX_RULES[explore.prefix.rule](explore.prefix),
            title=lambda explore: TITLES[explore.prefix.rule],
            leads=True,
            leaves="explore.prefix.num_restarts",
            retrieves=True,
            begins_below=True,
            teaches=_is_whole,
            stored_from="explore.prefix.min_reward",
        ),
        table=PrefixSettings,
        checks=(_wrong,),
    )
