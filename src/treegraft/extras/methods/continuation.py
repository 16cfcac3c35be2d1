"""ETC's continuation: where a rollout answers wrongly, a call is begun in place of its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treegraft import Tree
from treegraft.extras.methods.axpo import names_tools
from treegraft.extras.methods.leaves import StartsFirst, half_the_leaves, is_own
from treegraft.parts import ExplorerKind, Registry, Retry, RetryCause, Settings, Start, setting

RULE = "continuation"


class ContinuationSettings(Settings):
    """Calls in place of wrong answers (the continuation against early termination, ETC)."""

    num_starts: int = setting(8, ge=1, default_of=half_the_leaves)
    """First-level rollouts, at most explore.num_leaves, of which half is the default; the rest go
    on where others answered wrongly."""
    tool: str = setting("", acts="nothing", idle_unless=(names_tools,))
    """The tool whose call is begun in place of an answer; empty for the first."""
    min_reward: float = 1.0
    """Reward from which an answer is right."""


class Continuation(StartsFirst):
    """Opens first-level rollouts; when all have ended, each one with a wrong answer goes on: a call
    is begun in place of the answer, behind its thought, until the leaves are used up.

    Source: "Early Termination Collapse in Agentic RL: a simple rollout continuation strategy
    improves Search-R1" (hypercool.cn, 2026-06-08), of which we know the idea alone: a rollout that
    ends too early with a wrong answer is made to go on. Assumed: the answer is replaced, since an
    answer ends a trajectory here; wrong answers of rollouts that went on are continued again; with
    too few leaves those with the fewest calls come first. The forced opening carries no loss, and
    all leaves are one group. It differs from `CommitBranching` in that it does not wait for all
    rollouts to fail, and never begins answers.
    """

    wants_rewards = True

    def fill(self, tree: Tree, max_leaves: int) -> Start | Sequence[Retry]:
        """Returns a call for each wrong answer that has none beside it yet, as far as leaves are
        left."""
        own = self._settings
        tried = {step.cause.beside for step in tree.steps if isinstance(step.cause, RetryCause)}
        wrong = [
            (path.num_tool_calls, step.ordinals, step.id)
            for path in tree.trajectories()
            for step in path.steps[-1:]
            if path.status.rule.in_group
            and (path.reward or 0.0) < own.min_reward
            and step.content.answer is not None
            and is_own(step)
            and step.id not in tried
        ]
        places = [name for *_, name in sorted(wrong)][: max(0, max_leaves - len(tree.leaves))]
        return [Retry(one, 1, RULE, own.tool or None) for one in places] or Start(0)


def _make(explore: Any, facts: Any) -> Continuation:
    return Continuation(explore.continuation)


def register(registry: Registry) -> None:
    """Registers ETC's continuation."""
    registry.explorer(
        "continuation",
        ExplorerKind(
            make=_make,
            title="ETC's continuation",
            leads=True,
            leaves="explore.continuation.num_starts",
            opens_at_once=True,
            branches=True,
            begins_below=True,
            compares_together=True,
            tool="explore.continuation.tool",
        ),
        table=ContinuationSettings,
    )
