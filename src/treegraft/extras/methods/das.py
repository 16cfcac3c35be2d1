"""DAS' preference pairs: at a decision to call or to answer both are rolled out, and the side that
earned more is preferred."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from treegraft import Step, Tree
from treegraft.extras.methods.axpo import names_tools
from treegraft.extras.methods.leaves import (
    StartsFirst,
    half_the_leaves,
    is_own,
    marks_answers,
    openings,
)
from treegraft.parts import (
    ExplorerKind,
    Registry,
    Retry,
    RetryCause,
    Settings,
    Start,
    has,
    setting,
    when,
)

RULE = "counterfactual"


class CounterfactualSettings(Settings):
    """Both sides of decisions to call or to answer (DAS, arXiv 2602.03304)."""

    num_starts: int = setting(8, ge=1, default_of=half_the_leaves)
    """First-level rollouts, at most explore.num_leaves, of which half is the default; the rest take
    the other side of their decisions."""
    num_each: int = setting(1, ge=1)
    """Rollouts of the other side of one decision."""
    form: Literal["kept", "anew"] = "kept"
    """What begins the other side: the mark of the call or the answer behind the step's own thought,
    or, with "anew", the first token in which the tree's own steps of the other kind differ from the
    step, where there is such a step. For agents that decide in their thoughts."""
    tool: str = setting("", acts="nothing", idle_unless=(names_tools,))
    """The tool whose call is begun in place of an answer; empty for the first."""
    answers: bool = setting(True, default_of=marks_answers)
    """Whether answers are begun in place of calls, too; the format "chat" has no mark that begins
    one."""


class _LossFields(Settings):
    pair_coef: float = setting(0.0, ge=0, idle_unless=has("explore.explorers", RULE, or_own=True))
    """Weight of DPO's loss on the preferred sides of decisions (DAS); 0 for none."""
    pair_beta: float = setting(1.0, gt=0, idle_unless=when("loss.pair_coef"))
    """DPO's β. The usual .1 is for log-ratios of whole answers; here they are of one token."""


class Counterfactual(StartsFirst):
    """Opens first-level rollouts; when all have ended, an answer is begun in place of calls that
    followed a result, and a call in place of answers, so that both sides of a decision are known.

    Source: DAS (Zhang et al., WWW 2026, arXiv 2602.03304), which compares factual with
    counterfactual trajectories at each decision point; `das_loss.preference_loss` learns from them.
    We have the abstract and the description of its code, so this is assumed: where there are more
    decisions than leaves left, those taken are spread evenly over the tree, and the group is not
    asked whether it failed. Departures: the pairs are made anew in each update, of the agent as it
    is then; the paper makes them once and trains in a second stage. A call in place of a wrong
    answer is forced; its code writes such steps with a hint. The forced opening carries no loss of
    the policy gradient, and all leaves are one group there.
    """

    def __init__(self, settings: CounterfactualSettings) -> None:
        super().__init__(settings)
        self.begins_answers = settings.answers

    def fill(self, tree: Tree, max_leaves: int) -> Start | Sequence[Retry]:
        """Returns the other sides, once, as far as leaves are left."""
        if any(isinstance(step.cause, RetryCause) for step in tree.steps):
            return Start(0)
        own = self._settings
        members = [path for path in tree.trajectories() if path.status.rule.in_group]
        # Below the prompt nothing is known yet. A step that rollouts share is one decision.
        found = {step.id: step for path in members for step in path.steps[2:] if self._other(step)}
        places = sorted(found.values(), key=lambda step: step.ordinals)
        count = min(len(places), max(0, max_leaves - len(tree.leaves)) // own.num_each)
        retries = []
        for step in (places[n * len(places) // count] for n in range(count)):
            kind = self._other(step)
            assert kind is not None
            begun = openings(step, members, kind, own.tool) if own.form == "anew" else iter(())
            tool = own.tool or None if kind == "call" else None
            opening = next(begun, ())
            retries.append(Retry(step.id, own.num_each, RULE, tool, opens=kind, opening=opening))
        return retries or Start(0)

    def _other(self, step: Step) -> Literal["call", "answer"] | None:
        """The side that the step did not take; None where it made no decision of the policy's."""
        if not is_own(step):
            return None
        if step.content.answer is not None:
            return "call"
        return "answer" if step.content.calls and self.begins_answers else None


def register(registry: Registry) -> None:
    """Registers DAS's explorer and its loss on pairs."""
    registry.explorer(
        RULE,
        ExplorerKind(
            make=lambda explore, facts: Counterfactual(explore.counterfactual),
            title="DAS",
            leads=True,
            leaves="explore.counterfactual.num_starts",
            opens_at_once=True,
            branches=True,
            begins_below=True,
            compares_together=True,
            tool="explore.counterfactual.tool",
        ),
        table=CounterfactualSettings,
    )
    registry.objective(
        "pair_coef",
        "treegraft.extras.methods.das_loss:learn_pairs",
        role="loss",
        settings={"loss": _LossFields},
        metrics={
            "pair/tied_frac": "share of decisions whose two sides earned the same, so that they are"
            " no pair",
            "pair/calls_frac": "share of pairs in which the call is preferred to the answer",
            "pair/margin": "mean of log p(preferred) - log p(rejected) before the optimiser step,"
            " nats",
        },
    )
