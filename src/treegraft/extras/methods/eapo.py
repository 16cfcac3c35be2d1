"""EAPO's answer leaf: after each result of a rollout one leaf answers at once."""

from __future__ import annotations

from collections.abc import Sequence

from treegraft import Tree
from treegraft.extras.methods.leaves import StartsFirst, half_the_leaves, is_own
from treegraft.parts import ExplorerKind, Registry, Retry, RetryCause, Settings, Start, setting

RULE = "answer_leaf"


class AnswerLeafSettings(Settings):
    """Leaves that answer at once after a result (EAPO, arXiv 2606.02132)."""

    num_starts: int = setting(8, ge=1, default_of=half_the_leaves)
    """First-level rollouts, at most explore.num_leaves, of which half is the default; the rest
    answer at once."""


class AnswerLeaves(StartsFirst):
    """Opens first-level rollouts; when all have ended, an answer is begun in place of each call
    that followed a result, so that the group shows what the agent knows before it searches on.

    Source: the answer leaf of EAPO (arXiv 2606.02132), which is always on: it does not wait for
    failures, as `CommitBranching` does. We have a description and not the paper, so this is
    assumed: the latest places of each rollout come first, rollouts take turns, and leaves that are
    left over stay unused. The forced opening carries no loss.
    """

    begins_answers = True

    def fill(self, tree: Tree, max_leaves: int) -> Start | Sequence[Retry]:
        """Returns the answers, once, as far as leaves are left."""
        if any(isinstance(step.cause, RetryCause) for step in tree.steps):
            return Start(0)
        paths = [path for path in tree.trajectories() if path.status.rule.in_group]
        # Below the prompt nothing is known yet.
        calls = [
            [one.id for one in path.steps[2:] if one.content.calls and is_own(one)][::-1]
            for path in paths
        ]
        num_turns = max(map(len, calls), default=0)
        turns = (ids[turn] for turn in range(num_turns) for ids in calls if turn < len(ids))
        # A step that several rollouts share has one answer.
        places = list(dict.fromkeys(turns))[: max(0, max_leaves - len(tree.leaves))]
        return [Retry(one, 1, RULE, opens="answer") for one in places] or Start(0)


def register(registry: Registry) -> None:
    """Registers EAPO's answer leaves."""
    registry.explorer(
        "answer_leaf",
        ExplorerKind(
            make=lambda explore, facts: AnswerLeaves(explore.answer_leaf),
            title="EAPO's answer leaf",
            leads=True,
            leaves="explore.answer_leaf.num_starts",
            opens_at_once=True,
            branches=True,
            begins_below=True,
            compares_together=True,
        ),
        table=AnswerLeafSettings,
    )
