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


class PrefixSettings(Settings):
    """Stored trajectories of the task itself: rollouts below their first steps (PrefixRL, arXiv
    2601.18795), or whole ones in the group (LUFFY, arXiv 2504.14945)."""

    rule: Literal["prefixrl", "whole"] = "prefixrl"
    """"prefixrl" begins rollouts below a number of steps drawn at random; "whole" makes the stored
    trajectory itself a leaf of the group (LUFFY)."""
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
    as the prefixed problem is in the paper. Departures: a tree has both, so the share of
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
        # Nothing is stored for some tasks; they get ordinary rollouts.
        if tree.leaves or best is None:
            return [Start(max_leaves - len(tree.leaves))]
        own = self.starts(max_leaves)
        if own.num == max_leaves:
            return [own]
        # One place for all: a group needs several leaves.
        num_steps = 1 + keyed.keyed_int(*noise_key, "prefix", 0) % stored[best].num_steps
        return [own, Start(max_leaves - own.num, Below(best, num_steps, self.rule))]


class WholeTrajectory(UniformPrefix):
    """Makes the best stored trajectories themselves leaves of the group, with own rollouts.

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
        # A trajectory that was cut off has no answer to be rewarded.
        whole = [number for number in self.usable(stored) if stored[number].has_answer]
        chosen = whole[: self._settings.num_restarts]
        own = Start(max_leaves - len(chosen))
        return [own, *(Start(1, Below(number, None)) for number in chosen)]


PREFIX_RULES = {"prefixrl": UniformPrefix, "whole": WholeTrajectory}


TITLES = {"prefixrl": "PrefixRL", "whole": "LUFFY"}


def _is_whole(config: Any) -> bool:
    return bool(config.explore.prefix.rule == "whole")


def _wrong(config: Any) -> Iterator[Contradiction]:
    explore = config.explore
    if "prefix" not in explore.explorers:
        return
    # Refused rather than guessed.
    if "graft" in explore.explorers:
        yield Contradiction(
            ("explore.explorers",),
            f'explore.explorers: got {explore.explorers}; expected one of "graft" and "prefix":'
            " no paper says how a stored step that is history and one that is a graft share their"
            " credit.",
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
