"""Tree-GRPO: finished rollouts are grown further at steps chosen at random."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treegraft import Tree
from treegraft.parts import (
    BranchCause,
    Expand,
    ExplorerKind,
    Independent,
    OutcomeKind,
    Registry,
    Settings,
    Start,
    keyed,
    setting,
    value_of,
)


def _two_at_most(config: Any) -> int:
    return min(2, int(value_of(config, "explore.num_leaves")))


class TreeSearchSettings(Settings):
    """Random expansion of finished rollouts (Tree-GRPO, arXiv 2509.21240)."""

    num_starts: int = setting(2, ge=1, default_of=_two_at_most)
    """First-level rollouts (Tree-GRPO's M trees of a prompt), at most explore.num_leaves."""
    num_nodes: int = setting(2, ge=1)
    """Steps of each rollout that get a further child in a round (Tree-GRPO's N). Rounds go on until
    explore.num_leaves are used up."""


class TreeSearch(Independent):
    """Opens M first-level rollouts; when all have ended, N steps of each, drawn at random with
    repetition, get a further child, round after round until the leaves are used up.

    Source: Ji et al., Tree-GRPO, arXiv 2509.21240, sec. 3.2; its trees of a prompt are the
    first-level rollouts of one tree here, and its L rounds follow from explore.num_leaves =
    M (1 + N L). Departures: a step qualifies where a tool's result follows it, never the root,
    since a child of the root is a rollout of its own; leaves are not thinned out to K a rollout;
    where no step qualifies, the leaves that are missing become fresh rollouts.
    """

    expands = True

    def __init__(self, settings: TreeSearchSettings) -> None:
        self._settings = settings

    def starts(self, max_leaves: int) -> Start:
        """Returns M starts, at most `max_leaves`."""
        return Start(min(self._settings.num_starts, max_leaves))

    def fill(self, tree: Tree, max_leaves: int) -> Start | Sequence[Expand]:
        """Returns the next round's children, N below each first-level rollout."""
        missing = max_leaves - len(tree.leaves)
        places: dict[int, list[str]] = {}
        for step in tree.steps:
            if step.content.observations and step.num_sampled:
                places.setdefault(step.ordinals[1], []).append(step.id)
        if missing <= 0 or not places:
            return Start(missing)
        # Of the tree's own tokens: no generator is at hand here, and two seeds sample other ones.
        key: list[int | str] = [tree.group_id, len(tree.leaves)]
        for step in tree.steps:
            key += step.token_ids.tolist()
        cause = BranchCause(entropy_change=0.0, probability=1.0, rule="random")
        found = []
        # Round by round over the rollouts, so that a short budget is shared evenly.
        for number in range(self._settings.num_nodes):
            for start, steps in sorted(places.items()):
                step_id = keyed.keyed_choice(steps, start, number, *key)
                found.append(Expand(step_id, 1, cause))
        return found[:missing]


TREE_GRPO = OutcomeKind(compare="treegraft.extras.methods.tree_grpo_credit:compared")


def register(registry: Registry) -> None:
    """Registers Tree-GRPO's explorer and its credit."""
    registry.explorer(
        "tree_search",
        ExplorerKind(
            make=lambda explore, facts: TreeSearch(explore.tree_search),
            title="Tree-GRPO",
            leads=True,
            leaves="explore.tree_search.num_starts",
            opens_at_once=True,
            branches=True,
        ),
        table=TreeSearchSettings,
    )
    registry.credit("tree_grpo", TREE_GRPO)
