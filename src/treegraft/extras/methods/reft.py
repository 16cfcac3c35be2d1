"""REFT's first tokens at a decision: steps after a result begin with each of the first tokens that
the group has shown there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from treegraft import Tree
from treegraft.extras.methods.leaves import StartsFirst, half_the_leaves, is_own
from treegraft.parts import ExplorerKind, Registry, Retry, RetryCause, Settings, Start, setting

RULE = "first_tokens"


class FirstTokenSettings(Settings):
    """Steps that begin with another first token (after REFT, arXiv 2605.28295)."""

    num_starts: int = setting(8, ge=1, default_of=half_the_leaves)
    """First-level rollouts, at most explore.num_leaves, of which half is the default; the rest
    begin a step with another first token."""
    num_tokens: int = setting(4, ge=2)
    """First tokens that are tried (REFT's N), those that more of the steps began with first."""


class FirstTokens(StartsFirst):
    """Opens first-level rollouts; when all have ended, steps after a result are begun anew with the
    other first tokens that the group's steps after a result began with, evenly.

    Source: REFT (arXiv 2605.28295) draws the first token after the reasoning marker evenly from the
    policy's N likeliest, for every rollout of a group, and leaves all else as it is. Departures:
    the place is the decision, where a step after a result begins, behind the marks that all such
    steps share; candidates are the N most frequent tokens that the policy sampled there in this
    tree, since engines do not tell the unsampled ones; so half of the leaves are sampled first. The
    forced tokens carry no loss. All leaves are one group, whatever came of them.
    """

    def fill(self, tree: Tree, max_leaves: int) -> Start | Sequence[Retry]:
        """Returns the steps begun anew, once, as far as leaves are left: the latest of each rollout
        first, each other token in turn."""
        if any(isinstance(step.cause, RetryCause) for step in tree.steps):
            return Start(0)
        paths = [
            [step for step in path.steps[2:] if is_own(step)][::-1]
            for path in tree.trajectories()
            if path.status.rule.in_group
        ]
        turns = [step for turn in zip_longest(*paths) for step in turn if step is not None]
        # A step that several rollouts share has its place once.
        steps = list({step.id: step for step in turns}.values())
        place, tokens = decision([step.written_ids for step in steps])
        tokens = tokens[: self._settings.num_tokens]
        found = [
            Retry(step.id, 1, RULE, opening=(*step.written_ids[:place], token))
            for token in tokens
            for step in steps
            if token != step.written_ids[place]
        ]
        return found[: max(0, max_leaves - len(tree.leaves))] or Start(0)


def decision(texts: Sequence[Sequence[int]]) -> tuple[int, list[int]]:
    """Returns the first place at which the texts differ, and the tokens there, the most frequent
    first and then in the order in which they come; no token where they never differ."""
    for place, column in enumerate(zip(*texts, strict=False)):
        counts = {token: column.count(token) for token in column}
        if len(counts) > 1:
            return place, sorted(counts, key=lambda token: -counts[token])
    return 0, []


def _make(explore: Any, facts: Any) -> FirstTokens:
    return FirstTokens(explore.first_tokens)


def register(registry: Registry) -> None:
    """Registers the explorer of first tokens."""
    registry.explorer(
        "first_tokens",
        ExplorerKind(
            make=_make,
            title="first tokens, after REFT",
            leads=True,
            leaves="explore.first_tokens.num_starts",
            opens_at_once=True,
            branches=True,
            begins_below=True,
            compares_together=True,
        ),
        table=FirstTokenSettings,
    )
